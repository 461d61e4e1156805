"""Is there enough disk space? Counts checkpoints, several of which exist at once, and models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.check.bench import Bench
from posttrain.check.resources import num_bytes, shown_size
from posttrain.check.verdicts import Verdict
from posttrain.config import Resolved


@dataclass(frozen=True, kw_only=True)
class StageSpace:
    """What a stage writes, in bytes: each checkpoint, how many exist at once, and the models."""

    name: str
    checkpoint: int
    at_once: int
    models: int
    stay: int = 0
    """Checkpoints that are still there when the stage is done."""

    @property
    def checkpoints(self) -> int:
        """Bytes of all the checkpoints that exist at once."""
        return self.at_once * self.checkpoint

    @property
    def left(self) -> int:
        """Bytes that stay on the disk after the stage."""
        return self.models + self.stay * self.checkpoint


def check_disk(bench: Bench) -> Verdict | None:
    """Compare the peak disk use of the run with the free space on the disk of its folder.

    It only warns: most of it is temporary, and a checkpoint that the recipe does not ask for does
    not end a run where it cannot be written.
    """
    held = num_bytes(w for w in bench.policy.model.parameters() if w.requires_grad)
    stages = list(stage_space(bench.recipe, bench.stages, held=held))
    if not stages:
        return None
    folder = Path(bench.recipe.run.folder).absolute()
    fullest, needed, before = peak(stages)
    try:
        place, free = free_space(folder)
    except OSError as error:
        return Verdict("warn", f"{folder}: {error}", "set run.folder to another folder")
    parts = {
        f"{fullest.at_once} x {shown_size(fullest.checkpoint)} of checkpoints": fullest.at_once,
        f"{shown_size(fullest.models)} of models": fullest.models,
        f"{shown_size(before)} of stages before": before,
    }
    listed = ", ".join(text for text, count in parts.items() if count)
    kept = "" if bench.recipe.run.keep_last else "; every checkpoint more stays: run.keep_last = 0"
    return Verdict(
        "warn" if needed > free else "pass",
        f"up to {shown_size(needed)} in {fullest.name} ({listed}), {shown_size(free)} free on the "
        f"disk of {place}{kept}",
        "free some space, set run.folder to a folder on another disk, or lower run.keep_last; "
        "without room for a checkpoint, a run that is killed starts over, and without room for "
        "the model it ends with an error",
    )


def free_space(folder: Path) -> tuple[Path, int]:
    """Bytes that are free where a folder is or will be, and the part of its path that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def peak(stages: list[StageSpace]) -> tuple[StageSpace, int, int]:
    """The stage with the peak disk use, that use, and the bytes that earlier stages have left."""
    before = [sum(stage.left for stage in stages[:place]) for place in range(len(stages))]
    sums = [left + s.checkpoints + s.models for s, left in zip(stages, before, strict=True)]
    fullest = max(range(len(stages)), key=sums.__getitem__)
    return stages[fullest], sums[fullest], before[fullest]


def stage_space(recipe: Resolved, stages: Sequence[str], *, held: int) -> Iterator[StageSpace]:
    """What each of these stages that learns writes, for weights of ``held`` bytes.

    A checkpoint holds them and AdamW's two moments, 3 · held. A reward model or a critic of its
    own is taken to be as large as the policy.
    """
    for name in stages:
        if name == "sft":
            section = recipe.sft
            best = held if section.evaluate_every != 0 else 0
            models = held + (best if section.result == "last" else 0)
            yield _space(recipe, name, checkpoint=3 * held + best, models=models)
        elif name in ("reward", "dpo"):
            yield _space(recipe, name, checkpoint=3 * held, models=held)
        elif name == "rl":
            rl = recipe.rl
            separate = rl.critic is not None and rl.critic.kind == "separate"
            refreshed = rl.kl.placement != "none" and bool(rl.kl.refresh_every)
            checkpoint = (6 if separate else 3) * held + (held if refreshed else 0)
            yield _space(recipe, name, checkpoint=checkpoint, models=held)


def _space(recipe: Resolved, name: str, *, checkpoint: int, models: int) -> StageSpace:
    """How many checkpoints there are at once: those kept, and one that is being written.

    Where the recipe asks for none, one is still written at Ctrl-C.
    """
    run, every = recipe.run, getattr(recipe, name).save_every
    wanted = run.save_minutes > 0 if every is None else every > 0
    best = run.keep_best if name == "rl" else 0
    kept = run.keep_last + best if wanted and run.keep_last else 0
    stays = wanted and (every is not None or not run.keep_last)
    return StageSpace(
        name=name,
        checkpoint=checkpoint,
        at_once=kept + 1,
        models=models,
        stay=max(1, kept) if stays else 0,
    )
