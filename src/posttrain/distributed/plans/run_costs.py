"""The costs of a step, from the metrics and the rollouts of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from posttrain.distributed.engine_pool import ROUNDS
from posttrain.distributed.plans.measured import Measured, Observed, fit
from posttrain.distributed.plans.simulate import Costs, pieces
from posttrain.runs import RunFolder
from posttrain.runs.rollouts import rollout_table
from posttrain.track.printable import counted

WARM_UP = 2  # first steps of a run, in which memory is taken and kernels are compiled
MOST_STEPS = 200  # newest ones of a run that are read
FEWEST_STEPS = 4
SPREAD = 0.05  # standard deviation / mean of sizes, below which a line through them is a guess


def from_run(path: Path) -> Measured:
    """The costs of a run of RL, from its metrics and its rollouts."""
    folder = RunFolder(path)
    stage, config = folder.stage("rl"), folder.config
    if not stage.metrics.exists():
        raise ValueError(f"{path}: has no stage rl; name a run that has, or leave --from out")
    known = [r for r in stage.records() if "time/rollout" in r][WARM_UP:][-MOST_STEPS:]
    if len(known) < FEWEST_STEPS:
        raise ValueError(
            f"{path}: has {len(known)} steps after the first {WARM_UP}, and {FEWEST_STEPS} are "
            "needed; let it run longer, or leave --from out"
        )
    cluster = config.get("cluster", {})
    learners, engines = cluster.get("learners", 1), cluster.get("engines", 0)
    decode, train, groups, prompts = [], [], [], []
    graded = 0.0
    for record in known:
        asked, lengths = _lengths(stage.rollouts, int(record["step"]))
        samples, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
        drawn = 1 + record["rollout/resampled"] / len(lengths)  # groups for each that was learned
        decode.append(_decoded(lengths, engines, drawn=drawn, seconds=record["time/rollout"]))
        train.append(Observed(1.0, (tokens + asked * samples) / learners, record["time/train"]))
        graded += drawn * samples
        groups += lengths
        prompts.append(asked)
    redrawn = sum(record["rollout/resampled"] for record in known)
    notes = [f"{path}: {counted(len(known), 'step')}, from step {known[0]['step']}"]
    for name, rows in (("sampling", decode), ("learning", train)):
        if _guessed(rows):
            notes.append(
                f"{name}: all steps are of much the same size, so what a smaller share costs is a "
                "guess; without --from it is measured at two sizes"
            )
    if config["rl"].get("max_lag") and not cluster.get("engines"):
        notes.append("sampling and learning ran beside each other there, and slowed each other")
    return Measured(
        costs=Costs(
            decode=fit(decode),
            train=fit(train),
            grading=sum(record["time/reward"] for record in known) / graded,
            weight_bytes=_weight_bytes(folder),
            groups=groups,
            prompt=statistics.fmean(prompts),
        ),
        useful=len(groups) / (len(groups) + redrawn),
        notes=tuple(notes),
    )


def _decoded(
    groups: Sequence[Sequence[int]], engines: int, *, drawn: float, seconds: float
) -> Observed:
    """What one engine did of a batch: ``drawn`` groups for each of these, in further rounds."""
    parts = pieces(groups, engines, rounds=ROUNDS)
    each = math.ceil(len(parts) / max(1, engines))  # pieces of the engine that had most
    passes = each * statistics.fmean(max(map(max, part)) for part in parts)
    tokens = each * statistics.fmean(sum(map(sum, part)) for part in parts)
    return Observed(math.ceil(drawn) * passes, drawn * tokens, seconds)


def _lengths(rollouts: Path, step: int) -> tuple[float, list[list[int]]]:
    """The mean length of a step's prompts, and the lengths of its completions by group."""
    table = rollout_table(rollouts, step=step, columns=["group", "length", "prompt_tokens"])
    rows = table.to_pylist()
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(max(1, row["length"]))
    return statistics.fmean(len(row["prompt_tokens"]) for row in rows), list(groups.values())


def _weight_bytes(folder: RunFolder) -> int:
    """The size of the newest model that a run holds."""
    places = [folder.stage("rl").model, *folder.stage("rl").checkpoints.glob("*/*")]
    places += [folder.stage("sft").model, Path(folder.config["model"]["name"])]
    for place in places:
        found = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        if found:
            return found
    raise ValueError(
        f"{folder.path}: holds no model whose size could be read; let the stage rl end, or leave "
        "--from out"
    )


def _guessed(observed: Sequence[Observed]) -> bool:
    """Whether all have nearly the same work per pass, so that a pass and a unit look alike."""
    ratios = [row.each / row.fixed for row in observed if row.fixed]
    mean = statistics.fmean(ratios) if ratios else 0.0
    return len(ratios) < FEWEST_STEPS or statistics.pstdev(ratios) < SPREAD * mean
