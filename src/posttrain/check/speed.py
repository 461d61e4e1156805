"""Which way it samples and learns, how fast that is, and what the device could do at its best."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from posttrain.build.parts import choose_compile, choose_compute
from posttrain.build.ways import told
from posttrain.check.bench import Bench
from posttrain.check.report import Findings
from posttrain.check.signal import Sampled
from posttrain.check.trial import Trial
from posttrain.models.roofline import (
    Peak,
    Shape,
    average,
    decode_step,
    learning_flops,
    measured_peak,
    synchronize,
)
from posttrain.types import Rollout
from posttrain.types.ways import Way

FAR = 10  # times slower than on the fast way
# The share of the device's best that the fast way reaches with a model of 135M weights on an H200,
# at least (docs/benchmarks.md); on a CPU it is more.
REACHED = {"sampling": 0.12, "learning": 0.07}
CALLS = 100  # operations that a layer launches, generously: small models wait for these
MOVED = 7  # numbers of each weight that AdamW moves: three are read and written, a slope is read
ACCEPT = "accept it, or take a model of another family: docs/models.md lists which way each goes"
CHECKPOINTED = "turn rl.checkpoint_activations off where memory allows, or accept it"
BUSY = "look for other work on this machine, try another run.threads, or accept it"


def check_way(bench: Bench, trial: Trial, *, findings: Findings) -> None:
    """How it samples and learns; a run under way says so itself."""
    if bench.under_way:
        return
    line, device = told(trial.ways), bench.of_parts().device
    if choose_compile(bench.recipe, device):
        line += "; tried before sampling is compiled"
    findings.judged(
        "way",
        line,
        state="warn" if _reasons(*trial.ways.values()) else "pass",
        fix=CHECKPOINTED if "checkpointed" in line else ACCEPT,
    )


def check_speed(
    bench: Bench, sampled: Sampled, *, trial: Trial, seconds: float, findings: Findings
) -> None:
    """Tokens a second and seconds a step; ``seconds`` is what the sample takes once warm."""
    device = bench.of_parts().device
    peak = measured_peak(device, choose_compute(bench.recipe.model, device))
    shape, call = _shape(bench), _seconds_of_a_call(device)
    rollouts = sampled.rollouts
    drawn = sum(len(rollout.completion.tokens) for rollout in rollouts)
    least = launched = None
    if shape is not None:
        least, steps = _least_sampling(bench, rollouts, shape=shape, peak=peak)
        launched = steps * CALLS * call * (1 + shape.layers)
    _judge(
        "sampling",
        f"{drawn / seconds:,.0f} tokens/s, {len(rollouts)} rollouts at once",
        best="" if not least else f"{drawn / least:,.0f} tokens/s",
        times=(seconds, least, launched),
        way=trial.ways["samples"],
        findings=findings,
    )
    if shape is not None:
        least = _least_learning(bench, sampled.part(trial.sequences), shape=shape, peak=peak)
        parts = max(1, -(-trial.tokens // trial.micro_batch_tokens))
        launched = 3 * parts * CALLS * call * (1 + shape.layers)
    _judge(
        "learning",
        f"{trial.step_seconds:.3g} s for a step of {trial.sequences} rollouts",
        best="" if not least else f"{least:.3g} s",
        times=(trial.step_seconds, least, launched),
        way=trial.ways["learns"],
        findings=findings,
    )


def _judge(
    name: str,
    text: str,
    *,
    best: str,
    times: tuple[float, float | None, float | None],
    way: Way,
    findings: Findings,
) -> None:
    """A line of what was measured beside the best; far below what the fast way reaches warns."""
    seconds, least, launched = times
    if least is None or launched is None:
        findings.passed(name, f"{text}; for such a model the device's best is not counted")
        return
    usual = least / REACHED[name] + launched
    reasons = "; ".join(_reasons(way))
    findings.judged(
        name,
        f"{text}: {100 * least / seconds:.2g} % of the device's best, {best}"
        + (f" ({reasons})" if reasons and seconds > FAR * usual else ""),
        state="warn" if seconds > FAR * usual else "pass",
        fix=f"{FAR} times slower than it should be: {ACCEPT if reasons else BUSY}",
    )


def _reasons(*ways: Way) -> list[str]:
    return [str(missing) for way in ways for missing in way.fell_back]


def _shape(bench: Bench) -> Shape | None:
    """What the counting goes by; None for a model that does not say it as others do."""
    try:
        return Shape.of(bench.of_policy().model)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _least_sampling(
    bench: Bench, rollouts: Sequence[Rollout], *, shape: Shape, peak: Peak
) -> tuple[float, int]:
    """The least seconds that sampling these can take, and in how many steps."""
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    work = average([len(rollout.prompt.tokens) for rollout in rollouts], lengths)
    size = choose_compute(bench.recipe.model, bench.of_parts().device).itemsize
    step = decode_step(shape, rows=work.rows, length=work.length, item_bytes=size)
    return work.steps * step.seconds(peak), work.steps


def _least_learning(
    bench: Bench, rollouts: Sequence[Rollout], *, shape: Shape, peak: Peak
) -> float:
    """The least seconds of an optimiser step on these: every prompt once, then AdamW."""
    prompts = {rollout.group: len(rollout.prompt.tokens) for rollout in rollouts}
    read, pairs = sum(prompts.values()), sum(p * (p + 1) / 2 for p in prompts.values())
    for rollout in rollouts:
        asked, answered = len(rollout.prompt.tokens), len(rollout.completion.tokens) - 1
        read += answered
        pairs += asked * answered + answered * (answered + 1) / 2
    chosen = sum(len(rollout.completion.tokens) for rollout in rollouts)
    flops = sum(learning_flops(shape, read=read, chosen=chosen, pairs=pairs).values())
    weights = [weight for weight in bench.of_policy().model.parameters() if weight.requires_grad]
    moved = MOVED * sum(weight.numel() * weight.element_size() for weight in weights)
    return flops / peak.flops_per_second + moved / peak.bytes_per_second


def _seconds_of_a_call(device: str) -> float:
    """What the smallest operation takes: what a host needs to launch one."""
    few = torch.zeros(8, device=device)
    taken = []
    for _ in range(5):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(CALLS):
            few.add_(1)
        synchronize(device)
        taken.append((time.perf_counter() - begun) / CALLS)
    return min(taken)
