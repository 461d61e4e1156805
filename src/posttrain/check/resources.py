"""Estimates memory, time and disk space from the sizes of a run's parts and measured steps."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.build.algorithm import make_plan
from posttrain.build.sampler import make_sampling
from posttrain.check.bench import Bench
from posttrain.check.scores import reward_models
from posttrain.check.signal import useful
from posttrain.check.trial import REMEASURED, LinearCost, some_rollouts, take_step
from posttrain.check.verdicts import Verdict
from posttrain.config import Resolved
from posttrain.fast.score import chunk_elements_for, kept_elements_for
from posttrain.models.gpu_memory import free_bytes
from posttrain.rollout.collect import collect
from posttrain.rollout.environment import talking
from posttrain.track.printable import counted

_MACHINE = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def fit_weights(bench: Bench) -> Iterator[Verdict]:
    """How many weights there are; whether they fit while they are trained, without activations."""
    weights = list(bench.policy.model.parameters())
    count = sum(weight.numel() for weight in weights)
    yield Verdict("pass", f"{count:,} in {str(weights[0].dtype).removeprefix('torch.')}")
    verdict, bench.too_large = _memory(bench, _needs(bench))
    if bench.too_large:
        yield verdict._replace(name="memory")


def fit_step(bench: Bench) -> Verdict:
    """Memory with the activations of a micro-batch, extrapolated from steps of two sizes."""
    more, section, model = bench.trial, bench.rl, bench.policy.model
    count = more.sequences // 4
    fewer = len(some_rollouts(bench, count)) < more.sequences
    less = bench.less = take_step(bench, count) if fewer else more
    length = more.tokens / more.sequences
    step = length * section.prompts_per_step * section.group_size / section.minibatches
    tokens = min(more.micro_batch_tokens, step)
    vocabulary, weight = model.config.get_text_config().vocab_size, next(model.parameters())
    kept = LinearCost.through(
        (less.micro_tokens, less.activations), (more.micro_tokens, more.activations)
    )
    passing = {
        "activations": int(kept(tokens)),
        "logits": _logits_bytes(weight.device, int(tokens * vocabulary)),
    }
    return _memory(bench, _needs(bench) | passing)[0]


def _logits_bytes(device: torch.device, elements: int) -> int:
    """A chunk of logits, what is made of it, and all chunks where they are kept for backward."""
    kept = elements if elements <= kept_elements_for(device) else 0
    return 4 * (kept + 3 * min(chunk_elements_for(device), elements))


def _memory(bench: Bench, needs: Mapping[str, int]) -> tuple[Verdict, bool]:
    """A verdict on needed against free memory, and whether more is needed than free."""
    # Weights and reward model are loaded already.
    more = sum(needs.values()) - needs["weights"] - needs["reward model"]
    free = free_memory(bench.setup.device)
    listed = ", ".join(f"{name} {shown_size(size)}" for name, size in needs.items() if size)
    # The estimate may be off by a fifth: a run that may just fit is not refused.
    verdict = Verdict(
        "fail" if more > 1.2 * free else "warn" if more > 0.8 * free else "pass",
        f"{shown_size(sum(needs.values()))} at the peak, {shown_size(free)} free ({listed})",
        "lower rl.micro_batch_tokens, set rl.checkpoint_activations, rl.kl.offload or rl.kl.dtype, "
        "or take a smaller model",
    )
    return verdict, more > free


def _needs(bench: Bench) -> dict[str, int]:
    """Bytes on the device that training takes without activations, by purpose."""
    section, weights = bench.rl, list(bench.policy.model.parameters())
    held, trained = num_bytes(weights), num_bytes(w for w in weights if w.requires_grad)
    needs = {"weights": held, "gradients": trained, "AdamW": 2 * trained}
    if section.ahead and not bench.own_engine:
        needs["engine's copy"] = trained  # what does not learn is shared
    if trained < held and section.kl.placement != "none":
        needs["reference"] = trained  # of adapters these alone are kept
    elif section.kl.placement != "none" and not section.kl.offload:
        half = section.kl.dtype == "bfloat16" and weights[0].element_size() > 2
        needs["reference"] = held // 2 if half else held
    if section.critic is not None and section.critic.kind == "separate":
        needs["critic"] = 4 * trained
    models = [scorer.reward.model for scorer in reward_models(bench)]
    return needs | {"reward model": sum(num_bytes(model.parameters()) for model in models)}


def num_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Bytes that weights take."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def free_memory(device: str) -> int:
    """Bytes that are free on a device: a GPU's own, or the machine's within its control group."""
    if device != "cpu":
        return free_bytes(device)
    if not _MACHINE.is_file():  # not Linux: the physical memory stands in for the free one
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = _MACHINE.read_text(encoding="ascii").splitlines()
    known = dict(line.split(":", 1) for line in lines)
    free = int(known["MemAvailable"].split()[0]) * 1024
    if _GROUP_LIMIT.is_file():
        limit = _GROUP_LIMIT.read_text(encoding="ascii").strip()
        if limit.isdigit():
            free = min(free, int(limit) - int(_GROUP_USED.read_text(encoding="ascii")))
    return free


def shown_size(count: float) -> str:
    """Bytes in the largest unit in which the number is at least 1, up to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _sampling(bench: Bench) -> LinearCost:
    """Time of sampling by number of rollouts, measured again after warm-up."""
    size, count, spent = len(bench.groups[0]), len(bench.rollouts), bench.seconds["rollout"]
    if spent > REMEASURED[bench.setup.device] or len(bench.groups) == 1:
        bench.decode_seconds = spent
        return LinearCost(0.0, spent / count)
    few = max(1, len(bench.groups) // 4)
    short, bench.decode_seconds = _seconds(bench, few), _seconds(bench, len(bench.groups))
    return LinearCost.through((few * size, short), (count, bench.decode_seconds))


def _seconds(bench: Bench, groups: int) -> float:
    begun = time.perf_counter()
    collect(
        bench.engine,
        [group[0].prompt for group in bench.groups[:groups]],
        sampling=make_sampling(bench.rl),
        num_samples=len(bench.groups[0]),
        seed=bench.recipe.run.seed,
        reply=talking(bench.setup.env),
    )
    return time.perf_counter() - begun


def estimate_time(bench: Bench) -> Verdict:
    """Time of a step and of the stage, extrapolated from steps of two sizes."""
    section, less, trial, decode = bench.rl, bench.less, bench.trial, _sampling(bench)
    count, grading = len(bench.rollouts), bench.seconds["reward"]
    full = section.prompts_per_step * section.group_size
    infer = LinearCost.through(
        (less.tokens, less.infer_seconds), (trial.tokens, trial.infer_seconds)
    )
    learn = LinearCost.through((less.tokens, less.step_seconds), (trial.tokens, trial.step_seconds))
    drawn = full * _redrawn(bench)
    tokens = full * trial.tokens / trial.sequences
    inference = infer(tokens) if make_plan(section).needs_inference else 0.0
    times = {
        "rollout": decode(drawn),
        "grading": grading / count * drawn,
        "learning": inference
        + section.epochs * (section.minibatches * learn.fixed + learn.each * tokens),
    }
    step = sum(times.values())
    evaluations = 0.0
    if section.evaluate_every:
        num_evaluations = section.steps // section.evaluate_every + 1
        evaluations = num_evaluations * decode(section.evaluate_problems)
    share = trial.sequences / count
    measured = (bench.decode_seconds + grading) * share + trial.step_seconds
    if inference:
        times["of which old log-probs"] = inference
    listed = ", ".join(f"{name} {_time(value)}" for name, value in times.items())
    return Verdict(
        "pass",
        f"{_time(section.steps * step + evaluations)}: {counted(section.steps, 'step')} of {full} "
        f"rollouts, {_time(step)} each ({listed})"
        + (f", and {_time(evaluations)} of evaluations" if evaluations else "")
        + f"; measured: {_time(measured)} for {trial.sequences}",
    )


def _redrawn(bench: Bench) -> float:
    """How often a group is drawn on average, with dynamic sampling."""
    if not bench.rl.dynamic_sampling:
        return 1.0
    return min(1.0 + bench.rl.max_resamples, len(bench.groups) / max(1, useful(bench.groups)))


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
    kept = "" if bench.recipe.run.keep_last else "; every checkpoint is kept: run.keep_last = 0"
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
