"""Estimates memory and time of a run from the sizes of its parts and from measured steps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from posttrain.build.algorithm import make_plan
from posttrain.build.sampler import make_sampling
from posttrain.check.bench import Bench
from posttrain.check.scores import reward_models
from posttrain.check.signal import useful
from posttrain.check.trial import REMEASURED, LinearCost, some_rollouts, take_step
from posttrain.check.verdicts import Verdict
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
