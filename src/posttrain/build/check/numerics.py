"""Do sampler and trainer agree, and does an update do what it should? On weights put back after."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from posttrain.build.check.bench import Bench, unchanged
from posttrain.build.check.report import WAY, Findings, State
from posttrain.build.check.signal import Sampled, engine_of
from posttrain.build.check.trial import Trial, take_step, weights_owner
from posttrain.build.diagnosis import FLOAT32_ROUNDING, OTHER_ROUNDING, SAME_PROCESS
from posttrain.build.parts import choose_compute, filled
from posttrain.models.load import Policy
from posttrain.registry import split
from posttrain.rollout.collect import collect
from posttrain.types import Prompt, Sampling

FAR, TOO_FAR, NOWHERE = 0.5, 2.0, 1e-7  # nats a token that one optimiser step may move
NO_GRADIENT = 1e-3
# Settings beside the learning rate that say how far a step goes.
STEP = (
    "rl.max_gradient_norm",
    "rl.weight_decay",
    "rl.temperature",
    "rl.top_p",
    "rl.entropy_coefficient",
    "rl.kl.coefficient",
    "rl.loss.",
    "rewards.",
)
FEW = 16  # rollouts that show whether micro-batches change anything
PROBED = 2  # prompts that show whether new weights reach the engine


def check_numerics(bench: Bench, sampled: Sampled, *, trial: Trial, findings: Findings) -> None:
    """Engine against learner, the first ratio, micro-batches, one step, the way of the weights."""
    with findings.attempt("engine and learner"):
        _check_mismatch(bench, trial, findings=findings)
    with findings.attempt("first ratio"):
        _check_ratio(bench, trial, findings=findings)
    if not bench.fast:
        with findings.attempt("micro-batches"):
            _check_micro_batches(bench, sampled, findings=findings)
    with findings.attempt("one step"):
        _check_step(bench, trial, findings=findings)
    with findings.attempt(WAY):
        _check_way(bench, [group[0].prompt for group in sampled.groups], findings=findings)


def _exact(bench: Bench) -> bool:
    compute = choose_compute(bench.recipe.model, bench.of_parts().device)
    return compute is torch.float32 and bench.recipe.model.dtype == "float32"


def _check_mismatch(bench: Bench, trial: Trial, *, findings: Findings) -> None:
    section = filled(bench.recipe.rl)
    text = f"{trial.mismatch:.1e} nats a token apart, {trial.worst_mismatch:.1e} at most"
    if section.top_k or section.top_p < 1:
        findings.passed("engine and learner", f"{text} (top_k and top_p cut on purpose)")
        return
    name, _ = split(section.engine or "native", kind="engine")
    known = name in SAME_PROCESS and not bench.supplied_engine and _exact(bench)
    limit = FLOAT32_ROUNDING if known else OTHER_ROUNDING
    state: State = "pass" if trial.mismatch <= limit else "warn"
    findings.judged(
        "engine and learner",
        f"{text} ({limit:g} is rounding)",
        state="fail" if trial.mismatch > 10 * limit and not bench.supplied_engine else state,
        fix='set rl.correction to "truncated", the same precision on both sides, or rl.engine to '
        '"native"',
    )


def _check_ratio(bench: Bench, trial: Trial, *, findings: Findings) -> None:
    metrics = trial.result.metrics
    ratio, spread = metrics.get("ratio", 1.0), math.sqrt(metrics.get("ratio_variance", 0.0))
    tolerance = 1e-4 if _exact(bench) else 2e-2
    off = max(abs(ratio - 1), spread / 10) / tolerance
    findings.judged(
        "first ratio",
        f"{ratio:.5f} ± {spread:.0e}, new to old policy",
        state="pass" if off <= 1 else "warn" if off <= 10 else "fail",
        fix="the model is random, or depends on the batch: switch that off, or use float32",
    )


def _check_micro_batches(bench: Bench, sampled: Sampled, *, findings: Findings) -> None:
    """The same step with every sequence a micro-batch of its own."""
    few = sampled.part(FEW)
    trial, other = take_step(bench, few), take_step(bench, few, micro_batch_tokens=1)
    pairs = [
        (trial.result.loss, other.result.loss),
        (trial.result.gradient_norm, other.result.gradient_norm),
    ]
    # Where advantages cancel, loss and gradient are rounding alone, without a scale of their own.
    scale = max(abs(trial.result.gradient_norm), NO_GRADIENT)
    apart = max(abs(a - b) / max(abs(a), scale) for a, b in pairs)
    findings.judged(
        "micro-batches",
        f"loss and gradient differ by {apart:.0e} from one sequence at a time",
        state="pass" if apart <= (1e-3 if _exact(bench) else 5e-2) else "fail",
        fix="the model mixes the sequences of a batch (batch norm, dropout): use another one",
    )


def _check_step(bench: Bench, trial: Trial, *, findings: Findings) -> None:
    rate = filled(bench.recipe.rl).learning_rate
    made_up = " (rewards made up: the real ones agree)" if trial.stand_in else ""
    if not trial.finite:
        findings.failed(
            "one step",
            f"loss {trial.result.loss:g}, gradient {trial.result.gradient_norm:g}: not finite",
            fix="use float32, lower rl.learning_rate, look at the rewards",
        )
        return
    text = (
        f"of learning rate {rate:g} moves log-probs by {trial.moved:.1e} nats a token; "
        f"gradient {trial.result.gradient_norm:.2g}{made_up}"
    )
    state: State = "warn" if trial.moved > FAR or trial.moved < NOWHERE else "pass"
    low = trial.moved < NOWHERE
    findings.judged(
        "one step",
        text,
        state="fail" if trial.moved > TOO_FAR else state,
        fix=bench.usual_first(
            "raise rl.learning_rate: nothing moves" if low else "lower rl.learning_rate", of=STEP
        ),
    )


def _check_way(bench: Bench, prompts: Sequence[Prompt], *, findings: Findings) -> None:
    """Halve the output weights: the engine must say something else, and after that the same.

    An engine need not be the same to the last bit: rounding is no other answer.
    """
    policy, engine = bench.of_policy(), engine_of(bench)
    sync = engine.sync(weights_owner(bench))
    chosen = prompts[:PROBED]
    before = _said(bench, chosen)
    with unchanged(policy):
        _output(policy).data.mul_(0.5)
        sync(engine.version)
        changed = _said(bench, chosen)
    sync(engine.version)
    after = _said(bench, chosen)
    if _alike(before, changed):
        findings.failed(
            WAY,
            "no: with other weights it says the same",
            fix="the engine keeps weights of its own: bring them there, or use rl.engine = "
            '"native"',
        )
    elif _alike(after, changed):
        findings.failed(
            WAY,
            "once only: the old weights came back, and it says what the others made it say",
            fix='bring weights there as often as they change, or use rl.engine = "native"',
        )
    elif not _alike(before, after):
        findings.warned(
            WAY,
            "yes; but with the old weights back, it says something else than before",
            fix="the engine does not keep to its seed: runs with it cannot be repeated; rl.engine "
            '= "native" does',
        )
    else:
        findings.passed(WAY, "yes, and the same again when they are put back")


def _output(policy: Policy) -> torch.nn.Parameter:
    head = policy.model.get_output_embeddings()
    return head.weight if head is not None else list(policy.model.parameters())[-1]


Said = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Tokens and their log-probs, by completion."""


def _said(bench: Bench, prompts: Sequence[Prompt]) -> Said:
    sampling = Sampling(max_new_tokens=2, temperature=filled(bench.recipe.rl).temperature)
    rollouts = collect(engine_of(bench), prompts, sampling=sampling, num_samples=1, seed=0)
    return [(r.tokens, r.logprobs) for r in rollouts]


def _alike(first: Said, second: Said) -> bool:
    """The same tokens, with log-probs that rounding explains."""
    return all(
        a == b and all(abs(x - y) <= FLOAT32_ROUNDING for x, y in zip(p, q, strict=True))
        for (a, p), (b, q) in zip(first, second, strict=True)
    )
