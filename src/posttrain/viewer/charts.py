"""The charts of a stage: which curves, what healthy looks like, and what was found on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.pipelines.evaluate import share
from posttrain.report.facts import TITLES, RunFacts, describe_finding
from posttrain.runs.metrics_file import Record
from posttrain.viewer.shelf import ShownRun, UnknownError

BEFORE = 10  # steps that a step is compared with
MAX_POINTS = 1500  # of a curve; more are averaged in twos, threes, …


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that belong together; ``prefix`` adds all metrics whose names begin so."""

    key: str
    title: str
    healthy: str
    metrics: Mapping[str, str]
    prefix: str = ""
    percent: bool = False
    stacked: bool = False
    from_zero: bool = False


RL = (
    Chart(
        key="reward",
        title="Reward",
        healthy="Healthy: it rises, and its parts rise with it; one part that rises while another "
        "falls is where to look for hacking.",
        metrics={"reward/mean": "reward"},
        prefix="reward/part/",
    ),
    Chart(
        key="held_out",
        title="Held-out accuracy",
        healthy="Healthy: it rises with the reward; a reward that rises alone is not learning.",
        metrics={"eval/accuracy": "accuracy", "eval/reward": "reward"},
        percent=True,
    ),
    Chart(
        key="signal",
        title="Groups with signal",
        healthy="Healthy: most groups have answers of different reward; near 0 the prompts are all "
        "solved, or all too hard, and nothing is learned.",
        metrics={"rollout/groups_without_signal": "with signal"},
        percent=True,
        from_zero=True,
    ),
    Chart(
        key="kl",
        title="KL",
        healthy="Healthy: small and smooth; a jump is a step that went too far.",
        metrics={
            "objective/kl": "to the reference, a sequence",
            "policy/approx_kl": "of one step, a token",
        },
        from_zero=True,
    ),
    Chart(
        key="entropy",
        title="Entropy",
        healthy="Healthy: it falls slowly; a fast fall to 0 means that the policy has stopped to "
        "explore.",
        metrics={"objective/entropy": "nats a token"},
        from_zero=True,
    ),
    Chart(
        key="clip",
        title="Clip fraction",
        healthy="Healthy: below about 0.3; near 1 the learning rate is too high.",
        metrics={"policy/clip_low": "below", "policy/clip_high": "above"},
        percent=True,
        from_zero=True,
    ),
    Chart(
        key="length",
        title="Length",
        healthy="Healthy: it moves for a reason; cut answers (truncated) earn nothing and should "
        "be few.",
        metrics={"rollout/length": "tokens"},
        from_zero=True,
    ),
    Chart(
        key="cut",
        title="Cut answers",
        healthy="Healthy: near 0; else raise max_new_tokens, or ask why the answers run on.",
        metrics={"rollout/truncated": "cut at the limit", "reward/invalid": "grader broke"},
        percent=True,
        from_zero=True,
    ),
    Chart(
        key="critic",
        title="Critic",
        healthy="Healthy: the variance it explains rises towards 1; below 0 it is worse than a "
        "constant.",
        metrics={"value/explained_variance": "explained variance"},
    ),
    Chart(
        key="time",
        title="Time of a step",
        healthy="Healthy: steady; the part that grows is what to make faster.",
        metrics={
            "time/rollout": "sampling, s",
            "time/reward": "grading, s",
            "time/train": "learning, s",
        },
        stacked=True,
        from_zero=True,
    ),
)
FITTED = (
    Chart(
        key="loss",
        title="Loss",
        healthy="Healthy: both fall; where the held-out loss turns up, it learns by heart.",
        metrics={"loss/total": "training", "test/loss": "held out"},
    ),
    Chart(
        key="pairs",
        title="Pairs in the right order",
        healthy="Healthy: both rise, and the held-out one follows.",
        metrics={"preference/accuracy": "training", "test/accuracy": "held out"},
        percent=True,
    ),
    Chart(
        key="gradient",
        title="Gradient norm",
        healthy="Healthy: no spikes; those are cut at max_gradient_norm.",
        metrics={"train/gradient_norm": "norm"},
        from_zero=True,
    ),
)
SEPARATE = {"held_out"}  # of these the first metric that was logged is shown alone


def stage_charts(run: ShownRun, stage: str) -> dict[str, Any]:
    """The charts of a stage of a run, with the findings on its time axis."""
    if stage not in TITLES:
        raise UnknownError("there is no stage of this name")
    facts = run.facts
    records = facts.records(stage)
    charts = RL if stage == "rl" else FITTED
    config = facts.run.config.get(stage) or {}
    broken = facts.held_out.broken()
    judged = ("rl", "eval") if stage == "rl" else (stage,)  # the end of rl is judged in eval
    drawn = [_drawn(chart, records, config=config) for chart in charts]
    return {
        "run": run.name,
        "stage": stage,
        "stages": [name for name in TITLES if facts.run.stage(name).metrics.exists()],
        "charts": [chart for chart in drawn if chart["curves"]],
        "findings": [_finding(row) for row in facts.findings if row["stage"] in judged],
        "unjudged": facts.unjudged,
        "last_step": int(records[-1]["step"]) if records else 0,
        "steps": config.get("steps"),
        "results": _results(facts),
        "means": [
            {"label": name, "before": both[0], "after": both[1]}
            for name, both in facts.held_out.means().items()
        ],
        "notes": [
            *facts.held_out.notes(),
            *([f"broken held-out scores: {broken}"] if broken else []),
        ],
        "ways": facts.ways,
    }


def step_page(run: ShownRun, step: int) -> dict[str, Any]:
    """The numbers of a step against those of the steps before it: what moved most comes first.

    ``moved`` is the difference from their mean, in their deviations.
    """
    records = [r for r in run.facts.records("rl") if r["step"] <= step]
    if not records or records[-1]["step"] != step:
        raise UnknownError(f"step {step} has logged nothing")
    *before, now = records[-1 - BEFORE :]
    rows: list[dict[str, Any]] = []
    for name, value in now.items():
        known = [r[name] for r in before if math.isfinite(r.get(name, math.nan))]
        if name.startswith(("step", "time/", "train/learning")) or len(known) < 3:
            continue
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((each - mean) ** 2 for each in known) / len(known))
        if math.isfinite(value) and spread > 1e-12 * max(1.0, abs(mean)):
            row = {"metric": name, "value": value, "before": mean}
            rows.append({**row, "moved": (value - mean) / spread})
    rows.sort(key=lambda row: -abs(row["moved"]))
    main = next((row for row in rows if row["metric"] == "reward/mean"), None)
    findings = [_finding(f) for f in run.facts.findings if f["stage"] == "rl" and _covers(f, step)]
    shown = [row for row in rows if row is not main][:8]
    return {"step": step, "over": len(before), "reward": main, "rows": shown, "findings": findings}


def _covers(finding: Mapping[str, Any], step: int) -> bool:
    until = finding.get("until")
    return finding["step"] <= step and (until is None or step <= until)


def _drawn(chart: Chart, records: Sequence[Record], *, config: Mapping[str, Any]) -> dict[str, Any]:
    names = dict(chart.metrics)
    if chart.prefix:
        found = sorted({n for r in records for n in r if n.startswith(chart.prefix)})
        parts = {
            n: n.removeprefix(chart.prefix)
            for n in found
            if "/" not in n.removeprefix(chart.prefix)
        }
        names |= parts if len(parts) > 1 else {}
    curves: list[dict[str, Any]] = []
    for metric, label in names.items():
        points = [(r["step"], r[metric]) for r in records if math.isfinite(r.get(metric, math.nan))]
        if chart.key == "signal":
            points = [(step, 1 - value) for step, value in points]
        if not points or (chart.key in SEPARATE and curves):
            continue
        curves.append(_curve(metric, label, points=points, num=_asked(metric, config)))
    if curves and chart.key == "held_out" and curves[0]["metric"] == "eval/reward":
        return {**_head(chart), "title": "Held-out reward", "percent": False, "curves": curves}
    return {**_head(chart), "curves": curves}


def _head(chart: Chart) -> dict[str, Any]:
    names = ("key", "title", "healthy", "percent", "stacked", "from_zero")
    return {name: getattr(chart, name) for name in names}


def _curve(
    metric: str, label: str, *, points: Sequence[tuple[float, float]], num: int | None
) -> dict[str, Any]:
    size = math.ceil(len(points) / MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    curve: dict[str, Any] = {
        "metric": metric,
        "label": label,
        "steps": [int(part[-1][0]) for part in parts],
        "values": [sum(value for _, value in part) / len(part) for part in parts],
        "averaged": size,
    }
    if num:
        bounds = [share(round(value * num), num) for value in curve["values"]]
        curve |= {"low": [b.low for b in bounds], "high": [b.high for b in bounds], "of": num}
    return curve


def _asked(metric: str, config: Mapping[str, Any]) -> int | None:
    """Over how many problems a share is, where it is one of right answers."""
    return config.get("evaluate_problems") or None if metric == "eval/accuracy" else None


def _finding(row: Mapping[str, Any]) -> dict[str, Any]:
    steps, text = describe_finding(row)
    return {"finding": row["finding"], "step": row["step"], "until": row.get("until")} | {
        "steps": steps,
        "text": text,
    }


def _results(facts: RunFacts) -> list[dict[str, Any]]:
    """Shares of right answers before and after, with their intervals."""
    rows = []
    for found in facts.held_out.shares().values():
        ends = {"before": found.before, "after": found.after}
        both = {when: None if value is None else list(value) for when, value in ends.items()}
        rows.append({"label": found.label, "note": found.note, **both})
    return rows
