"""Will it fit, and how long will it take? From what the parts hold, and from what was measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.build.check.bench import Bench
from posttrain.build.check.report import Findings, State
from posttrain.build.check.signal import Sampled, engine_of
from posttrain.build.check.speed import check_speed, check_way
from posttrain.build.check.trial import REMEASURED, Trial, take_step
from posttrain.build.learners import make_plan
from posttrain.build.parts import filled, make_sampling
from posttrain.fast.scores import chunk_elements_for
from posttrain.models.gpu_memory import free_bytes
from posttrain.models.reward_scorer import ModelScorer
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import collect
from posttrain.track.text import counted

_MACHINE = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def enough_memory(bench: Bench, findings: Findings) -> bool:
    """Whether what the weights take, without activations, fits: a step may be tried."""
    weights = list(bench.of_policy().model.parameters())
    count = sum(weight.numel() for weight in weights)
    findings.passed("parameters", f"{count:,} in {str(weights[0].dtype).removeprefix('torch.')}")
    return _check_memory(bench, memory_needs(bench), findings=findings, told=False)


def check_resources(bench: Bench, sampled: Sampled, *, trial: Trial, findings: Findings) -> None:
    """Memory and time, from the step that was tried and from a smaller one."""
    with findings.attempt("way"):
        check_way(bench, trial, findings=findings)
    with findings.attempt("memory and time"):
        part = sampled.part(trial.sequences // 4)
        less = take_step(bench, part) if len(part) < trial.sequences else trial
        passing = _passing(bench, less, more=trial)
        _check_memory(bench, memory_needs(bench) | passing, findings=findings)
        decode, seconds = _decoding(bench, sampled)
        _check_time(
            bench, sampled, steps=(less, trial), decoded=(decode, seconds), findings=findings
        )
        check_speed(bench, sampled, trial=trial, seconds=seconds, findings=findings)


def _passing(bench: Bench, less: Trial, *, more: Trial) -> dict[str, int]:
    """Bytes that come and go with a micro-batch."""
    section = filled(bench.recipe.rl)
    length = more.tokens / more.sequences
    step = length * section.prompts_per_step * section.group_size / section.minibatches
    tokens = min(more.micro_batch_tokens, step)
    model = bench.of_policy().model
    vocabulary, weight = model.config.get_text_config().vocab_size, next(model.parameters())
    kept = Law.through((less.micro_tokens, less.activations), (more.micro_tokens, more.activations))
    return {
        "activations": int(kept(tokens)),
        "logits": 3 * 4 * min(chunk_elements_for(weight.device), int(tokens * vocabulary)),
    }


def _check_memory(
    bench: Bench, needs: dict[str, int], *, findings: Findings, told: bool = True
) -> bool:
    """Compare what is needed with what is free; without ``told``, only a failure is a line."""
    more = sum(needs.values()) - needs["weights"] - needs["reward model"]  # these are there already
    free = free_memory(bench.of_parts().device)
    listed = ", ".join(f"{name} {shown_size(size)}" for name, size in needs.items() if size)
    # An estimate is not exact to the last fifth: what may just fit is not refused.
    state: State = "fail" if more > 1.2 * free else "warn" if more > 0.8 * free else "pass"
    if told or more > free:
        findings.judged(
            "memory",
            f"{shown_size(sum(needs.values()))} at the peak, {shown_size(free)} free ({listed})",
            state=state,
            fix="lower rl.micro_batch_tokens, set rl.checkpoint_activations, rl.kl.offload or "
            "rl.kl.dtype, or take a smaller model",
        )
    return more <= free


def memory_needs(bench: Bench) -> dict[str, int]:
    """Bytes on the device that weights take while they are trained, by what they are for."""
    section = filled(bench.recipe.rl)
    weights = list(bench.of_policy().model.parameters())
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    trained = sum(w.numel() * w.element_size() for w in weights if w.requires_grad)
    needs = {"weights": held, "gradients": trained, "AdamW": 2 * trained}
    if section.max_lag and not bench.supplied_engine:
        needs["engine's copy"] = held
    if section.kl.placement != "none" and not section.kl.offload:
        half = section.kl.dtype == "bfloat16" and weights[0].element_size() > 2
        needs["reference"] = held // 2 if half else held
    if section.critic is not None and section.critic.kind == "separate":
        needs["critic"] = 4 * held
    return needs | {"reward model": _reward_bytes(bench)}


def _reward_bytes(bench: Bench) -> int:
    scorer = bench.of_parts().scorer
    rewards = scorer.rewards if isinstance(scorer, RewardScorer) else ()
    models = [r.function.reward.model for r in rewards if isinstance(r.function, ModelScorer)]
    weights = [weight for model in models for weight in model.parameters()]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def free_memory(device: str) -> int:
    """Bytes that are free on a device: a GPU's own, or the machine's within its control group."""
    if device != "cpu":
        return free_bytes(device)
    if not _MACHINE.is_file():  # not Linux: all there is has to do
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
    """Bytes in the largest unit that leaves something before the point, up to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True)
class Law:
    """Seconds, or bytes, as ``fixed + each · n``, from measurements at two sizes."""

    fixed: float
    each: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Law:
        """The law through two points ``(n, measured)``; neither part is ever negative.

        >>> Law.through((1, 3.0), (3, 7.0))
        Law(fixed=1.0, each=2.0)
        """
        (few, short), (many, long) = small, large
        slope = (long - short) / (many - few) if many > few else long / many
        slope = min(max(slope, 0.0), long / many)
        return cls(max(long - slope * many, 0.0), slope)

    def __call__(self, count: float) -> float:
        return self.fixed + self.each * count


def _check_time(
    bench: Bench,
    sampled: Sampled,
    *,
    steps: tuple[Trial, Trial],
    decoded: tuple[Law, float],
    findings: Findings,
) -> None:
    section, (less, trial) = filled(bench.recipe.rl), steps
    count = len(sampled.rollouts)
    full = section.prompts_per_step * section.group_size
    decode, seconds = decoded
    infer = Law.through((less.tokens, less.infer_seconds), (trial.tokens, trial.infer_seconds))
    learn = Law.through((less.tokens, less.step_seconds), (trial.tokens, trial.step_seconds))
    drawn = full * _redrawn(bench, sampled)
    tokens = full * trial.tokens / trial.sequences
    looks = infer(tokens) if make_plan(section).looks_back else 0.0
    times = {
        "rollout": decode(drawn),
        "grading": sampled.grade_seconds / count * drawn,
        "learning": looks
        + section.epochs * (section.minibatches * learn.fixed + learn.each * tokens),
    }
    step = sum(times.values())
    evaluations = 0.0
    if section.evaluate_every:
        looks_taken = section.steps // section.evaluate_every + 1
        evaluations = looks_taken * decode(section.evaluate_problems or 0)
    share = trial.sequences / count
    measured = (seconds + sampled.grade_seconds) * share + trial.step_seconds
    if looks:
        times["of which old log-probs"] = looks
    listed = ", ".join(f"{name} {_time(value)}" for name, value in times.items())
    findings.passed(
        "time",
        f"{_time(section.steps * step + evaluations)}: {counted(section.steps, 'step')} of {full} "
        f"rollouts, {_time(step)} each ({listed})"
        + (f", and {_time(evaluations)} of evaluations" if evaluations else "")
        + f"; measured: {_time(measured)} for {trial.sequences}",
    )


def _decoding(bench: Bench, sampled: Sampled) -> tuple[Law, float]:
    """The law of sampling by rollouts, and the seconds that the sample takes once warm."""
    size, count = len(sampled.groups[0]), len(sampled.rollouts)
    limit = REMEASURED[bench.of_parts().device]
    if sampled.rollout_seconds > limit or len(sampled.groups) == 1:
        return Law(0.0, sampled.rollout_seconds / count), sampled.rollout_seconds
    few = max(1, len(sampled.groups) // 4)
    short = _seconds(bench, sampled, groups=few)
    long = _seconds(bench, sampled, groups=len(sampled.groups))
    return Law.through((few * size, short), (count, long)), long


def _seconds(bench: Bench, sampled: Sampled, *, groups: int) -> float:
    begun = time.perf_counter()
    collect(
        engine_of(bench),
        [group[0].prompt for group in sampled.groups[:groups]],
        sampling=make_sampling(filled(bench.recipe.rl)),
        num_samples=len(sampled.groups[0]),
        seed=bench.recipe.run.seed,
    )
    return time.perf_counter() - begun


def _redrawn(bench: Bench, sampled: Sampled) -> float:
    """How often a group is drawn on average, with dynamic sampling."""
    section = filled(bench.recipe.rl)
    if not section.dynamic_sampling or not section.max_resamples:
        return 1.0
    return min(1.0 + section.max_resamples, len(sampled.groups) / max(1, sampled.useful))


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
