"""What a run leaves behind: evaluations, curves, samples, a summary, and the object to ask."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.build.advice import next_steps
from posttrain.config import Recipe
from posttrain.pipelines.evaluate import Evaluation, is_correct
from posttrain.runs import (
    Interval,
    Rollouts,
    RunFolder,
    Sample,
    plot_curves,
    read_rollouts,
    render_summary,
    replacing,
)
from posttrain.track.encoding import encode_json
from posttrain.types import Rollout

NUM_SAMPLES = 5


class Run:
    """A finished run: its numbers, its samples, its picture and its model folder.

    >>> run = Run(RunFolder("runs/demo"))  # doctest: +SKIP
    >>> run.summary["accuracy_after"]      # doctest: +SKIP
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def summary(self) -> dict[str, Any]:
        """What came out, as in ``summary.json``."""
        return self.folder.summary or {}

    @property
    def model(self) -> Path:
        """The trained model: an ordinary Hugging Face folder."""
        model = self.folder.model
        if model is None:
            raise ValueError(f"{self.folder.path}: no stage of this run trained a model")
        return model

    def metrics(self, stage: str = "rl") -> Any:
        """The numbers of a stage, one row a step: a pyarrow table, ``.to_pandas()`` for a frame."""
        return self.folder.stage(stage).frame()

    def samples(self, step: int | None = None, *, limit: int = 10) -> list[dict[str, Any]]:
        """Rollouts of the RL stage, of one step or of all."""
        return list(read_rollouts(self.folder.stage("rl").rollouts, step=step, limit=limit))

    def rollouts(self) -> Rollouts:
        """All rollouts of the RL stage, by filter, order and page."""
        return Rollouts(self.folder.stage("rl").path)

    def plot(self, path: str | Path | None = None, *, stage: str = "rl") -> Path:
        """Draw the curves of a stage; without a path, into the run folder."""
        target = Path(path) if path is not None else self.folder.curves
        plot_curves(self.folder.stage(stage).records(), target, title=self.folder.path.name)
        return target

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"


def write_evaluation(path: Path, found: Evaluation) -> dict[str, Any]:
    """Write one line a problem, and return the estimates as plain numbers."""
    counts: dict[int, list[bool]] = {}
    for rollout in found.sampled:
        counts.setdefault(rollout.group, []).append(is_correct(rollout, found.correct_by))
    with replacing(path) as beside, beside.open("wb") as file:
        for rollout in found.greedy:
            line = _problem(rollout, found.correct_by) | _sampled(counts.get(rollout.group, []))
            file.write(encode_json(line) + b"\n")
    estimates = {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in found.estimates.items()
    }
    return {
        "estimates": estimates,
        "reward": found.mean_reward,
        "parts": dict(found.parts),
        "invalid": found.invalid,
        "reason": found.reason,
    }


def finish_run(folder: RunFolder, *, recipe: Recipe, seconds: float, console: Console) -> Run:
    """Draw the curves, pick samples, write the summary and print it."""
    run = Run(folder)
    stage = next((name for name in ("rl", "reward", "sft") if name in folder.stages), None)
    places: dict[str, str | Path] = {"run folder": folder.path}
    if stage is not None:
        places |= {"picture": run.plot(stage=stage)}
        places |= {} if folder.model is None else {"model": folder.model}
    held_out = {"before": _before(folder), "after": _after(folder)}
    samples = _pairs(folder)
    folder.write_samples([vars(sample) for sample in samples])
    records = folder.stage("rl").records()
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    summary: dict[str, Any] = {"seconds": seconds, "seed": recipe.run.seed}
    summary |= {"stages": list(folder.stages), "model": str(folder.model or "")}
    for when, found in held_out.items():
        if found:
            estimates = found["estimates"]
            summary |= {f"accuracy_{when}": estimates["accuracy"]["value"], when: estimates}
            summary |= {f"invalid_{when}": found["invalid"]}
            if found["invalid"]:
                summary.setdefault("invalid_reason", found.get("reason", ""))
    if "prefer" in folder.stages:
        places |= {"preferences": folder.stage("prefer").path / "pairs.jsonl"}
    verdict = (folder.stage_record("reward") or {}).get("verdict")
    if verdict:
        places |= {"reward model": folder.stage("reward").model}
        summary |= {"reward_model": {k: v for k, v in verdict.items() if k != "calibration"}}
        places |= {"calibration": folder.stage("reward").path / "calibration.png"}
    if rewards:
        summary |= {"reward_first": rewards[0], "reward_last": rewards[-1]}
    findings = folder.findings()
    summary |= {"diagnosis": findings}
    if "rl" in folder.stages:
        Rollouts(folder.stage("rl").path)  # leaves its index, for whoever looks at the run first
    folder.write_summary(summary)
    console.print(
        render_summary(
            title=folder.path.name,
            seconds=seconds,
            accuracy_before=_interval(held_out["before"]),
            accuracy_after=_interval(held_out["after"]),
            broken=_broken(held_out),
            reward=(rewards[0], rewards[-1]) if rewards else None,
            measures=_measures(folder),
            facts=_made(folder) | _facts(verdict),
            places=places,
            findings=findings,
            samples=samples,
            next_steps=next_steps(
                folder,
                recipe,
                findings=findings,
                problems=list(_problems(folder.stage("eval").path / "problems.jsonl").values()),
            ),
        )
    )
    return run


def _measures(folder: RunFolder) -> dict[str, tuple[float | None, float | None]]:
    """Means of the rewards on held-out problems, before and after; one alone says no more than
    the accuracy does.
    """
    before, after = (found.get("parts", {}) for found in (_before(folder), _after(folder)))
    names = dict.fromkeys([*before, *after])
    if len(names) < 2:
        return {}
    return {f"held-out {name}": (before.get(name), after.get(name)) for name in names}


def _made(folder: RunFolder) -> dict[str, str]:
    """What the stage prefer has made, in words."""
    record = folder.stage_record("prefer") or {}
    made = {}
    for split in ("train", "test"):
        if found := record.get(split):
            broken = f", {found['broken']:,} broken scores" if found["broken"] else ""
            made[f"preferences, {split} prompts"] = (
                f"{found['sets']:,} and {found['ties']:,} ties{broken}"
            )
    return made


def _facts(verdict: Mapping[str, Any] | None) -> dict[str, str]:
    """What the reward model is worth, in words."""
    if not verdict:
        return {}
    return {
        "reward model, held-out pairs": f"{verdict['accuracy']:.1%} of {verdict['num_pairs']:,}",
        "  mean margin": f"{verdict['margin']:.2f}",
        "  calibration error": f"{verdict['calibration_error']:.1%}",
        "  correlation with length": f"{verdict['length_correlation']:+.2f}",
    }


def _problem(rollout: Rollout, correct_by: str) -> dict[str, Any]:
    score = rollout.score
    assert score is not None, "evaluate scores every rollout"
    answer = rollout.prompt.columns.get("answer")
    return {
        "id": rollout.prompt.id,
        "prompt": rollout.prompt.text,
        "answer": None if answer is None else str(answer),
        "completion": rollout.completion.text,
        "correct": is_correct(rollout, correct_by),
        "reward": score.value,
        "parts": dict(score.parts),
        "state": score.state,
        "reason": score.reason,
        "stop_reason": rollout.completion.stop_reason,
        "num_tokens": len(rollout.completion.tokens),
    }


def _sampled(correct: list[bool]) -> dict[str, Any]:
    return {"samples": len(correct), "samples_correct": sum(correct)} if correct else {}


def _interval(found: Mapping[str, Any]) -> Interval | None:
    return Interval(**found["estimates"]["accuracy"]) if found else None


def _broken(held_out: Mapping[str, Mapping[str, Any]]) -> str:
    """The shares of broken held-out scores and the first reason, or nothing where none broke.

    >>> _broken({"before": {"invalid": 0.0}, "after": {"invalid": 0.25, "reason": "no answer"}})
    'before 0%, after 25% (first: no answer)'
    """
    known = {when: found for when, found in held_out.items() if found}
    broken = [found.get("reason", "") for found in known.values() if found["invalid"]]
    if not broken:
        return ""
    shares = {when: f"{100 * found['invalid']:.3g}%" for when, found in known.items()}
    told = [f"{when} {share}" for when, share in shares.items()]
    alike = len(set(shares.values())) == 1
    return f"{shares.popitem()[1] if alike else ', '.join(told)} (first: {broken[0]})"


def _before(folder: RunFolder) -> dict[str, Any]:
    """The evaluation before RL, where it asked what the one at the end did."""
    found = dict((folder.stage_record("rl") or {}).get("before", {}))
    after = _after(folder)
    return found if found.get("of") == after.get("of", found.get("of")) else {}


def _after(folder: RunFolder) -> dict[str, Any]:
    """The evaluation at the end of the run."""
    return dict((folder.stage_record("eval") or {}).get("after", {}))


def _pairs(folder: RunFolder) -> list[Sample]:
    """Held-out problems before and after; those whose verdict changed come first."""
    before = _problems(folder.stage("rl").path / "before.jsonl") if _before(folder) else {}
    after = _problems(folder.stage("eval").path / "problems.jsonl")
    shared = [name for name in after if name in before]
    shared.sort(key=lambda name: _right(before[name]) == _right(after[name]))
    return [
        Sample(
            prompt=after[name]["prompt"],
            before=before[name]["completion"],
            after=after[name]["completion"],
            answer=after[name]["answer"],
            right_before=_right(before[name]),
            right_after=_right(after[name]),
        )
        for name in shared[:NUM_SAMPLES]
    ]


def _right(problem: Mapping[str, Any]) -> bool | None:
    """Whether the answer was right; None where it could not be graded."""
    return problem["correct"] if problem["state"] == "ok" else None


def _problems(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = path.read_bytes().split(b"\n")
    return {row["id"]: row for row in map(json.loads, filter(None, lines))}
