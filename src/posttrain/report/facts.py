"""The results of a run, read once: picture, page and terminal draw them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.report.held_out import Change, HeldOut, held_out
from posttrain.runs.files import read_record
from posttrain.runs.folder import RunFolder
from posttrain.runs.metrics_file import Record, merge_steps
from posttrain.runs.resume import BEFORE_PROBLEMS
from posttrain.track.diagnosis.history import WINDOW, series
from posttrain.track.printable import counted
from posttrain.track.shown import Ends, ends, over_steps

Row = dict[str, Any]
TITLES = {
    "sft": "Supervised fine-tuning",
    "prefer": "Preferences",
    "reward": "Reward model",
    "dpo": "Direct preference optimisation",
    "rl": "Reinforcement learning",
    "eval": "Evaluation",
}
TRAINED = ("rl", "dpo", "reward", "sft")  # stages with curves, the most informative first
NUM_SAMPLES = 5
SIGNS: dict[Any, str] = {True: " ✓", False: " ✗", None: " ?"}
"""The sign after an answer: right, wrong, or unknown because its grader broke."""


@dataclass(frozen=True)
class RunFacts:
    """The results of a run; each fact is read from its folder on first use, and once."""

    run: RunFolder
    _records: dict[str, list[Record]] = field(default_factory=dict, repr=False)

    def records(self, stage: str) -> list[Record]:
        """The logged records of a stage, one a step; empty before the first step."""
        if stage not in self._records:
            self._records[stage] = merge_steps(self.run.stage(stage).records())
        return self._records[stage]

    @cached_property
    def name(self) -> str:
        """The name of the run."""
        return self.run.path.resolve().name

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty before the end of the run."""
        return self.run.summary or {}

    @cached_property
    def seconds(self) -> float | None:
        """How long it took, where that is known."""
        return number_or_none(self.summary.get("seconds"))

    @cached_property
    def held_out(self) -> HeldOut:
        """The evaluations before and after training."""
        return held_out(self.run)

    @cached_property
    def reward(self) -> Ends | None:
        """The training reward at its start and at its end."""
        return ends(series(self.records("rl"), "reward/mean"))

    @cached_property
    def measures(self) -> dict[str, Change]:
        """Means of rewards before and after, by what is averaged; of dpo, preferences held out."""
        found, reward = self.held_out.means(), self.reward
        if reward is not None:
            found[f"training reward, {over_steps(reward.num)}"] = reward[:2]
        if right := series(self.records("dpo"), "test/accuracy"):
            count = series(self.records("dpo"), "test/num")
            of = f", of {count[-1]:,.0f}" if count else ""
            found[f"held-out preferences in their order{of}"] = (right[0], right[-1])
        return found

    @cached_property
    def losses(self) -> dict[str, Change]:
        """The losses of the stages sft and dpo; a held-out loss always covers all held-out rows."""
        losses: dict[str, Change] = {}
        for stage in ("sft", "dpo"):
            records = self.records(stage)
            trained, tested = ends(series(records, "loss/total")), series(records, "test/loss")
            if trained is not None:
                losses[f"{stage} loss, {over_steps(trained.num)}"] = trained[:2]
            if tested:
                lowest, low = "", min(tested)
                if tested[-1] != low:
                    step = next(r["step"] for r in records if r.get("test/loss") == low)
                    lowest = f", lowest {low:.3f} at step {step:.0f}"
                after = tested[-1]
                if self.run.config.get(stage, {}).get("result") == "best":
                    lowest, after = lowest and f" of the best weights, step {step:.0f}", low
                losses[f"{stage} held-out loss{lowest}"] = (tested[0], after)
        return losses

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """Accuracy and calibration of the reward model on held-out pairs; empty without one."""
        return dict((self.run.stage_record("reward") or {}).get("verdict") or {})

    @cached_property
    def produced_texts(self) -> dict[str, str]:
        """The preferences and the reward model that were made, in words."""
        record, texts = self.run.stage_record("prefer") or {}, {}
        for split in ("train", "test"):
            if found := record.get(split):
                broken = f", {found['broken']:,} broken scores" if found["broken"] else ""
                text = f"{found['sets']:,} and {found['ties']:,} ties{broken}"
                texts[f"preferences, {split} prompts"] = text
        if verdict := self.verdict:
            pairs = f"{verdict['accuracy']:.1%} of {verdict['num_pairs']:,}"
            texts |= {
                "reward model, held-out pairs": pairs,
                "  mean margin": f"{verdict['margin']:.2f}",
                "  calibration error": f"{verdict['calibration_error']:.1%}",
                "  correlation with length": f"{verdict['length_correlation']:+.2f}",
            }
        return texts

    @cached_property
    def findings(self) -> list[Row]:
        """The findings of the diagnosis, of all stages."""
        return self.run.findings()

    @cached_property
    def unjudged(self) -> str:
        """Why it says little that no rule of the diagnosis holds; empty where it says much."""
        steps = len(series(self.records("rl"), "reward/mean"))
        if "rl" not in self.run.stages or steps >= 2 * WINDOW:
            return ""
        return f"rl has {counted(steps, 'step')}, too few to judge: some rules need {2 * WINDOW}"

    @cached_property
    def ways(self) -> dict[str, str]:
        """The fast paths that each stage that trains uses, in a line."""
        paths = {stage: self.run.stage(stage).ways for stage in TITLES}
        there = {stage: path for stage, path in paths.items() if path.exists()}
        return {stage: str(read_record(path, "line")["line"]) for stage, path in there.items()}

    @cached_property
    def problems(self) -> list[Row]:
        """The held-out problems with what the model answered in the end."""
        return _lines(self.run.stage("eval").path / "problems.jsonl")

    @cached_property
    def samples(self) -> list[Row]:
        """Answers before and after, as :meth:`draw_samples` drew them when the run ended."""
        return self.run.samples

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The paths of the outputs, by what they are."""
        run, paths = self.run, {"run folder": self.run.path}
        if set(TRAINED) & set(run.stages):
            paths |= {"picture": run.curves}
            paths |= {} if run.model is None else {"model": run.model}
        if "prefer" in run.stages:
            paths |= {"preferences": run.stage("prefer").path / "pairs.jsonl"}
        if self.verdict:
            paths |= {"reward model": run.stage("reward").model}
            paths |= {"calibration": run.stage("reward").path / "calibration.png"}
        return paths

    def draw_samples(self, seed: int) -> tuple[list[Row], str]:
        """A few held-out problems before and after, drawn at random, and how they were drawn."""
        rows = _lines(self.run.stage("rl").path / BEFORE_PROBLEMS) if self.held_out.before else []
        before = {row["id"]: row for row in rows}
        shared = {row["id"]: row for row in self.problems if row["id"] in before}
        if not shared:
            return [], ""
        chosen = set(random.Random(seed).sample(list(shared), min(NUM_SAMPLES, len(shared))))
        how = f"{len(chosen)} of {len(shared)} held-out problems, drawn at random (seed {seed})"
        if len(chosen) == len(shared):
            how = f"all {len(shared)} held-out problems"
        checked = self.held_out.checked
        samples = [
            _sample(before[name], after, checked=checked)
            for name, after in shared.items()
            if name in chosen
        ]
        return samples, how + ("" if checked else "; the reward in brackets")

    def to_summary(self) -> dict[str, Any]:
        """The part of ``summary.json`` that is neither time nor recipe."""
        numbers: dict[str, Any] = self.held_out.summary()
        if self.verdict:
            verdict = {name: value for name, value in self.verdict.items() if name != "calibration"}
            numbers |= {"reward_model": verdict}
        if (reward := self.reward) is not None:
            numbers |= {"reward_first": reward.first, "reward_last": reward.last}
            numbers |= {"reward_steps": reward.num}
        return numbers | {"diagnosis": self.findings, "ways": self.ways}


def _lines(path: Path) -> list[Row]:
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    try:
        return [dict(json.loads(line)) for line in lines if line]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: a line is not a row of JSON ({error}); restore it") from error


def _sample(before: Row, after: Row, *, checked: bool) -> Row:
    """``right`` is None where an answer could not be graded, and where nothing checks answers."""
    both = {"before": before, "after": after}
    graded = {when: row if row["state"] == "ok" else {} for when, row in both.items()}
    return {
        "prompt": after["prompt"],
        **{when: row["completion"] for when, row in both.items()},
        **{f"turns_{when}": row["turns"] for when, row in both.items() if row.get("turns")},
        "answer": after["answer"],
        **{f"right_{w}": row.get("correct") if checked else None for w, row in graded.items()},
        **{f"reward_{when}": row.get("reward") for when, row in graded.items()},
    }


def describe_finding(finding: Mapping[str, Any]) -> tuple[str, str]:
    """The steps of a finding and its text, with the remedy unless the finding is over.

    >>> describe_finding({"step": 3, "until": 9, "text": "it rose", "remedy": "Lower it."})
    ('step 3, cleared at step 9', 'it rose.')
    """
    until = finding.get("until")
    if until is not None:
        return f"step {finding['step']}, cleared at step {until}", f"{finding['text']}."
    return f"step {finding['step']} to the end", f"{finding['text']}. {finding['remedy']}"


def number_or_none(value: Any) -> float | None:
    """A finite number; None for whatever else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
