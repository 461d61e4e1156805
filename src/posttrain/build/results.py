"""What a run leaves behind: evaluations, curves, samples, a summary, and the object to ask."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.build.advice import next_steps
from posttrain.build.parts import choose_device, hardware
from posttrain.config import Resolved
from posttrain.pipelines.evaluate import Evaluation
from posttrain.runs import (
    HeldOut,
    Rollouts,
    RunFolder,
    Sample,
    ends,
    held_out,
    plot_curves,
    read_rollouts,
    render_summary,
    replacing,
    series,
)
from posttrain.runs.held_out import BEFORE_PROBLEMS
from posttrain.runs.report import ways_of
from posttrain.track.curves import over_steps
from posttrain.track.encoding import encode_json
from posttrain.track.progress import phase
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
        folder = self.folder.stage(stage)
        title, by = self.folder.path.name, folder.accuracy_by
        plot_curves(folder.records(), target, title=title, accuracy_by=by)
        return target

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"


def write_evaluation(path: Path, found: Evaluation) -> dict[str, Any]:
    """Write one line a problem, and return the estimates as plain numbers."""
    counts: dict[int, list[bool | None]] = {}
    for rollout in found.sampled:
        counts.setdefault(rollout.group, []).append(found.is_right(rollout))
    with replacing(path) as beside, beside.open("wb") as file:
        for rollout in found.greedy:
            right = found.is_right(rollout)
            line = _problem(rollout, right=right) | _sampled(counts.get(rollout.group, []))
            file.write(encode_json(line) + b"\n")
    estimates = {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in found.estimates.items()
    }
    return {
        "estimates": estimates,
        "problems": len(found.greedy),
        "above_one": dict(found.above_one),
        "reward": found.mean_reward,
        "parts": dict(found.parts),
        "invalid": found.invalid,
        "reason": found.reason,
    }


@phase("drawing the curves and writing the summary")
def finish_run(folder: RunFolder, *, recipe: Resolved, seconds: float, console: Console) -> Run:
    """Draw the curves, pick samples, write the summary and print it."""
    run = Run(folder)
    stage = next((name for name in ("rl", "reward", "sft") if name in folder.stages), None)
    places: dict[str, str | Path] = {"run folder": folder.path}
    if stage is not None:
        places |= {"picture": run.plot(stage=stage)}
        places |= {} if folder.model is None else {"model": folder.model}
    found = held_out(folder)
    samples, drawn = _pairs(folder, found, seed=recipe.run.seed)
    folder.write_samples([vars(sample) for sample in samples])
    summary: dict[str, Any] = {"seconds": seconds, "seed": recipe.run.seed}
    summary |= {"hardware": hardware(choose_device(recipe))}
    summary |= {"stages": list(folder.stages), "model": str(folder.model or "")}
    summary |= _held_out_numbers(found)
    summary |= {"answers_shown": drawn} if drawn else {}
    if "prefer" in folder.stages:
        places |= {"preferences": folder.stage("prefer").path / "pairs.jsonl"}
    verdict = (folder.stage_record("reward") or {}).get("verdict")
    if verdict:
        places |= {"reward model": folder.stage("reward").model}
        summary |= {"reward_model": {k: v for k, v in verdict.items() if k != "calibration"}}
        places |= {"calibration": folder.stage("reward").path / "calibration.png"}
    rewards = ends(series(folder.stage("rl").records(), "reward/mean"))
    measures = found.means()
    if rewards is not None:
        summary |= {"reward_first": rewards.first, "reward_last": rewards.last}
        summary |= {"reward_steps": rewards.num}
        measures[f"training reward, {over_steps(rewards.num)}"] = (rewards.first, rewards.last)
    findings = folder.findings()
    summary |= {"diagnosis": findings}
    summary |= {"ways": ways_of(folder)}
    if "rl" in folder.stages:
        Rollouts(folder.stage("rl").path)  # leaves its index, for whoever looks at the run first
    folder.write_summary(summary)
    console.print(
        render_summary(
            title=folder.path.name,
            seconds=seconds,
            shares=list(found.shares().values()),
            broken=_broken({"before": found.before, "after": found.after}),
            notes=found.notes(),
            measures=measures,
            losses=_losses(folder),
            facts=_made(folder) | _facts(verdict),
            places=places,
            findings=findings,
            samples=samples,
            drawn=drawn,
            next_steps=next_steps(
                folder,
                recipe,
                findings=findings,
                problems=list(_problems(folder.stage("eval").path / "problems.jsonl").values()),
            ),
        ),
        crop=False,
    )
    return run


def _held_out_numbers(found: HeldOut) -> dict[str, Any]:
    """What ``summary.json`` says of the evaluations: shares, every reward, broken scores."""
    if not found.exists:
        return {}
    shares = found.shares()
    full: dict[str, dict[str, float]] = {}
    numbers: dict[str, Any] = {"accuracy_by": found.accuracy_by, "above_one": found.above_one}
    means: dict[str, dict[str, float]] = {}
    for when, told in (("before", found.before), ("after", found.after)):
        if not told:
            continue
        values = {name: getattr(share, when) for name, share in shares.items()}
        known = {name: interval.value for name, interval in values.items() if interval is not None}
        if "accuracy" in known:
            numbers[f"accuracy_{when}"] = known.pop("accuracy")
        for name, value in known.items():
            full.setdefault(name.removeprefix("full_marks/"), {})[when] = value
        for name, value in told["parts"].items():
            means.setdefault(name, {})[when] = value
        numbers |= {when: found.estimates(when), f"mean_reward_{when}": told["reward"]}
        numbers[f"invalid_{when}"] = told["invalid"]
        numbers["problems"] = told.get("problems")  # one from before this was kept has none
        if told["invalid"]:
            numbers.setdefault("invalid_reason", told.get("reason", ""))
    weighed = {name: {"weight": weight} for name, weight in found.weights.items()}
    rewards = {name: {**weighed.get(name, {}), **means.get(name, {})} for name in weighed | means}
    return {**numbers, **({"full_marks": full} if full else {}), "rewards": rewards}


def _losses(folder: RunFolder) -> dict[str, tuple[float | None, float | None]]:
    """The losses of the stage sft; those on held-out rows are of all of them, each time."""
    records, losses = folder.stage("sft").records(), {}
    trained = ends(series(records, "loss/total"))
    if trained is not None:
        losses[f"sft loss, {over_steps(trained.num)}"] = (trained.first, trained.last)
    tested = series(records, "test/loss")
    if tested:
        losses[f"sft held-out loss{_lowest(records, tested)}"] = (tested[0], tested[-1])
    return dict(losses)


def _lowest(records: Sequence[Mapping[str, float]], tested: Sequence[float]) -> str:
    """Where the held-out loss was lowest, unless it is so at the end.

    >>> _lowest([{"step": 0, "test/loss": 3.0}, {"step": 4, "test/loss": 1.0}], [3.0, 1.0])
    ''
    >>> _lowest([{"step": 4, "test/loss": 1.0}, {"step": 8, "test/loss": 2.0}], [1.0, 2.0])
    ', lowest 1.000 at step 4'
    """
    low = min(tested)
    if tested[-1] == low:
        return ""
    step = next(record["step"] for record in records if record.get("test/loss") == low)
    return f", lowest {low:.3f} at step {step:.0f}"


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


def _problem(rollout: Rollout, *, right: bool | None) -> dict[str, Any]:
    score = rollout.score
    assert score is not None, "evaluate scores every rollout"
    answer = rollout.prompt.columns.get("answer")
    return {
        "id": rollout.prompt.id,
        "prompt": rollout.prompt.text,
        "answer": None if answer is None else str(answer),
        "completion": rollout.completion.text,
        "correct": right,
        "reward": score.value,
        "parts": dict(score.parts),
        "state": score.state,
        "reason": score.reason,
        "stop_reason": rollout.completion.stop_reason,
        "num_tokens": len(rollout.completion.tokens),
    }


def _sampled(right: list[bool | None]) -> dict[str, Any]:
    """Of how many samples how many are right, where something checks them."""
    if not right:
        return {}
    known = [verdict for verdict in right if verdict is not None]
    return {"samples": len(right)} | ({"samples_correct": sum(known)} if known else {})


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


def _pairs(folder: RunFolder, found: HeldOut, *, seed: int) -> tuple[list[Sample], str]:
    """A few held-out problems before and after, drawn at random, and how they were drawn."""
    before = _problems(folder.stage("rl").path / BEFORE_PROBLEMS) if found.before else {}
    after = _problems(folder.stage("eval").path / "problems.jsonl")
    shared = [name for name in after if name in before]
    if not shared:
        return [], ""
    chosen = set(random.Random(seed).sample(shared, min(NUM_SAMPLES, len(shared))))
    how = f"{len(chosen)} of {len(shared)} held-out problems, drawn at random (seed {seed})"
    if len(chosen) == len(shared):
        how = f"all {len(shared)} held-out problems"
    checked = found.accuracy_by and found.accuracy_by not in found.above_one
    how += "" if checked else "; the reward in brackets"
    samples = [
        Sample(
            prompt=after[name]["prompt"],
            before=before[name]["completion"],
            after=after[name]["completion"],
            answer=after[name]["answer"],
            right_before=_graded(before[name], "correct") if checked else None,
            right_after=_graded(after[name], "correct") if checked else None,
            reward_before=_graded(before[name], "reward"),
            reward_after=_graded(after[name], "reward"),
        )
        for name in shared
        if name in chosen
    ]
    return samples, how


def _graded(problem: Mapping[str, Any], key: str) -> Any:
    """What was said of an answer; None where it could not be graded."""
    return problem[key] if problem["state"] == "ok" else None


def _problems(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = path.read_bytes().split(b"\n")
    return {row["id"]: row for row in map(json.loads, filter(None, lines))}
