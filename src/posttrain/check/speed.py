"""Which fast paths sampling and learning use, their speed, and the device's theoretical best."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from posttrain.build.declared_ways import told
from posttrain.build.setup import choose_compile, choose_compute
from posttrain.check.bench import Bench
from posttrain.check.resources import num_bytes
from posttrain.check.trial import some_rollouts
from posttrain.check.verdicts import Verdict
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

FAR = 10  # times slower than usual on the fast path
# The least share of the device's best that the fast path reaches with a model of 135M weights on an
# H200 (docs/benchmarks.md); on a CPU it is more.
REACHED = {"sampling": 0.12, "learning": 0.07}
# Upper bound of the kernels that a layer launches: launching dominates in small models.
LAUNCHES_PER_LAYER = 100
TIMED_CALLS = 100  # tiny operations between two looks at the clock
MOVED = 7  # memory accesses of AdamW for each weight: 3 reads and writes, 1 read of the gradient
ACCEPT = "accept it, or take a model of another family: docs/models.md lists which way each goes"
CHECKPOINTED = "turn rl.checkpoint_activations off where memory allows, or accept it"
UNCOUNTED = "; for such a model the device's best is not counted"
BUSY = "look for other work on this machine, try another run.threads, or accept it"


def report_way(bench: Bench) -> Verdict:
    """Which fast paths sampling and learning use."""
    ways = bench.trial.ways
    line = told(ways)
    if choose_compile(bench.recipe, bench.setup.device):
        line += "; tried before sampling is compiled"
    return Verdict(
        "warn" if _reasons(*ways.values()) else "pass",
        line,
        CHECKPOINTED if "checkpointed" in line else ACCEPT,
    )


def measure_sampling(bench: Bench) -> Verdict:
    """Sampled tokens a second, after warm-up."""
    rollouts, seconds = bench.rollouts, bench.decode_seconds
    drawn = sum(sum(rollout.mask) for rollout in rollouts)
    text = f"{drawn / seconds:,.0f} tokens/s, {len(rollouts)} rollouts at once"
    shape = _shape(bench)
    if shape is None:
        return Verdict("pass", text + UNCOUNTED)
    least, steps = _least_sampling(bench, rollouts, shape=shape)
    usual = least / REACHED["sampling"] + steps * _launched(bench, shape)
    return judge(
        text,
        best=f"{drawn / least:,.0f} tokens/s",
        times=(seconds, least, usual),
        way=bench.trial.ways["samples"],
    )


def measure_learning(bench: Bench) -> Verdict:
    """Seconds of an optimiser step."""
    trial, seconds = bench.trial, bench.trial.step_seconds
    text = f"{seconds:.3g} s for one optimiser step on {trial.sequences} rollouts"
    shape = _shape(bench)
    if shape is None:
        return Verdict("pass", text + UNCOUNTED)
    least = _least_learning(bench, some_rollouts(bench, trial.sequences), shape=shape)
    parts = max(1, -(-trial.tokens // trial.micro_batch_tokens))
    # Forward + backward ≈ 3 passes.
    usual = least / REACHED["learning"] + 3 * parts * _launched(bench, shape)
    return judge(
        text, best=f"{least:.3g} s", times=(seconds, least, usual), way=trial.ways["learns"]
    )


def judge(text: str, *, best: str, times: tuple[float, float, float], way: Way) -> Verdict:
    """Measured against least and usual seconds (``times``, in this order); far slower warns."""
    seconds, least, usual = times
    slow = seconds > FAR * usual
    reasons = "; ".join(_reasons(way))
    text += f": {_percent(least / seconds)} of the device's best, {best}"
    text += f"; usual here: {_percent(least / usual)} or more" if slow else ""
    return Verdict(
        "warn" if slow else "pass",
        f"{text} ({reasons})" if reasons and slow else text,
        f"{FAR} times slower than it should be: {ACCEPT if reasons else BUSY}",
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _launched(bench: Bench, shape: Shape) -> float:
    """Seconds that launching the operations of a pass takes."""
    return LAUNCHES_PER_LAYER * _seconds_of_a_call(bench.setup.device) * (1 + shape.layers)


def _peak(bench: Bench) -> Peak:
    device = bench.setup.device
    return measured_peak(device, choose_compute(bench.recipe.model, device))


def _reasons(*ways: Way) -> list[str]:
    return [str(missing) for way in ways for missing in way.fell_back]


def _shape(bench: Bench) -> Shape | None:
    """The sizes of the model for counting operations; None where its config lacks them."""
    try:
        return Shape.of(bench.policy.model)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _least_sampling(
    bench: Bench, rollouts: Sequence[Rollout], *, shape: Shape
) -> tuple[float, int]:
    """The least seconds that sampling these can take, and in how many steps."""
    lengths = [sum(rollout.mask) for rollout in rollouts]
    # What an environment said is read, as a prompt is.
    read = [
        len(r.prompt.tokens) + len(r.tokens) - n for r, n in zip(rollouts, lengths, strict=True)
    ]
    work = average(read, lengths)
    size = choose_compute(bench.recipe.model, bench.setup.device).itemsize
    step = decode_step(shape, rows=work.rows, length=work.length, item_bytes=size)
    return work.steps * step.seconds(_peak(bench)), work.steps


def _least_learning(bench: Bench, rollouts: Sequence[Rollout], *, shape: Shape) -> float:
    """The least seconds of an optimiser step on these: every prompt once, then AdamW."""
    prompts = {rollout.group: len(rollout.prompt.tokens) for rollout in rollouts}
    read, pairs = sum(prompts.values()), sum(p * (p + 1) / 2 for p in prompts.values())
    for rollout in rollouts:
        # The last token is never an input.
        asked, answered = len(rollout.prompt.tokens), len(rollout.tokens) - 1
        read += answered
        pairs += asked * answered + answered * (answered + 1) / 2
    chosen = sum(sum(rollout.mask) for rollout in rollouts)
    flops = sum(learning_flops(shape, read=read, chosen=chosen, pairs=pairs).values())
    trained = num_bytes(w for w in bench.policy.model.parameters() if w.requires_grad)
    peak = _peak(bench)
    return flops / peak.flops_per_second + MOVED * trained / peak.bytes_per_second


def _seconds_of_a_call(device: str) -> float:
    """Seconds of a tiny operation, which are those of launching a kernel."""
    few = torch.zeros(8, device=device)
    taken = []
    for _ in range(5):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(TIMED_CALLS):
            few.add_(1)
        synchronize(device)
        taken.append((time.perf_counter() - begun) / TIMED_CALLS)
    return min(taken)
