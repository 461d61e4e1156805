"""Do sampler and trainer agree, and does an update do what it should? Weights are restored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from posttrain.build.sampler import FLOAT32_ROUNDING, OTHER_ROUNDING, SAME_PROCESS
from posttrain.build.setup import choose_compute
from posttrain.check.bench import Bench, unchanged
from posttrain.check.trial import take_step, weights_owner
from posttrain.check.verdicts import State, Verdict
from posttrain.registry import split
from posttrain.rollout.collect import by_group, collect
from posttrain.types import Sampling

FAR, TOO_FAR, NOWHERE = 0.5, 2.0, 1e-7  # log-prob change of one optimiser step, in nats a token
NO_GRADIENT = 1e-3
# Settings beside the learning rate that determine the size of a step.
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
FEW = 16  # rollouts for comparing micro-batch sizes
PROBED = 2  # prompts for testing whether new weights reach the engine, and what it obeys
REPEATS = 8  # completions of each that must be alike
# Settings that leave one completion to draw: whoever draws several does not obey.
SHARPEST = {
    "temperature": Sampling(max_new_tokens=8, temperature=0.0),
    "top_k": Sampling(max_new_tokens=8, top_k=1),
    "top_p": Sampling(max_new_tokens=8, top_p=1e-6),
}


def _exact(bench: Bench) -> bool:
    compute = choose_compute(bench.recipe.model, bench.setup.device)
    return compute is torch.float32 and bench.recipe.model.dtype == "float32"


def _ours(bench: Bench) -> bool:
    name, _ = split(bench.rl.engine or "native", kind="engine")
    return name in SAME_PROCESS and not bench.own_engine


def compare_engine(bench: Bench) -> Verdict:
    """How far the log-probs of engine and learner differ on the same tokens."""
    trial, section = bench.trial, bench.rl
    text = f"{trial.mismatch:.1e} nats a token apart, {trial.worst_mismatch:.1e} at most"
    if section.top_k or section.top_p < 1:
        return Verdict("pass", f"{text} (top_k and top_p cut on purpose)")
    limit = FLOAT32_ROUNDING if _ours(bench) and _exact(bench) else OTHER_ROUNDING
    state: State = "pass" if trial.mismatch <= limit else "warn"
    return Verdict(
        "fail" if trial.mismatch > 10 * limit and not bench.own_engine else state,
        f"{text} ({limit:g} is rounding)",
        'set rl.correction to "truncated", the same precision on both sides, or rl.engine to '
        '"native"',
    )


def measure_ratio(bench: Bench) -> Verdict:
    """The ratio of new to old policy before anything is learned: 1."""
    metrics = bench.trial.result.metrics
    ratio, spread = metrics.get("ratio", 1.0), math.sqrt(metrics.get("ratio_variance", 0.0))
    tolerance = 1e-4 if _exact(bench) else 2e-2
    off = max(abs(ratio - 1), spread / 10) / tolerance
    return Verdict(
        "pass" if off <= 1 else "warn" if off <= 10 else "fail",
        f"{ratio:.5f} ± {spread:.0e}, new to old policy",
        "the model is random, or depends on the batch: switch that off, or use float32",
    )


def compare_micro_batches(bench: Bench) -> Verdict | None:
    """The same step with every sequence a micro-batch of its own."""
    if bench.fast:
        return None
    whole = take_step(bench, FEW).result
    single = take_step(bench, FEW, micro_batch_tokens=1).result
    pairs = [(whole.loss, single.loss), (whole.gradient_norm, single.gradient_norm)]
    # Where advantages cancel, loss and gradient are rounding noise: compare with a fixed scale.
    scale = max(abs(whole.gradient_norm), NO_GRADIENT)
    apart = max(abs(a - b) / max(abs(a), scale) for a, b in pairs)
    return Verdict(
        "pass" if apart <= (1e-3 if _exact(bench) else 5e-2) else "fail",
        f"loss and gradient differ by {apart:.0e} from one sequence at a time",
        "the model mixes the sequences of a batch (batch norm, dropout): use another one",
    )


def measure_step(bench: Bench) -> Verdict:
    """How far one step moves the log-probs."""
    moved, result = bench.trial.moved, bench.trial.result
    if not all(map(math.isfinite, (result.loss, result.gradient_norm, moved))):
        return Verdict(
            "fail",
            f"loss {result.loss:g}, gradient {result.gradient_norm:g}: not finite",
            "use float32, lower rl.learning_rate, look at the rewards",
        )
    made_up = " (rewards made up: the real ones agree)" if bench.trial.stand_in else ""
    low = moved < NOWHERE
    fix = "raise rl.learning_rate: nothing moves" if low else "lower rl.learning_rate"
    return Verdict(
        "fail" if moved > TOO_FAR else "warn" if moved > FAR or low else "pass",
        f"of learning rate {bench.rl.learning_rate:g} moves log-probs by {moved:.1e} nats a token; "
        f"gradient {result.gradient_norm:.2g}{made_up}",
        bench.usual_first(fix, of=STEP),
    )


def follow_weights(bench: Bench) -> Verdict:
    """Halve the output weights: samples must change, and change back when weights are restored.

    Log-probs that differ by rounding count as the same.
    """
    sync = bench.engine.sync(weights_owner(bench))
    before = _sampled(bench)
    with unchanged(bench.policy):
        head = bench.policy.model.get_output_embeddings()
        weight = head.weight if head is not None else list(bench.policy.model.parameters())[-1]
        weight.data.mul_(0.5)
        sync(bench.engine.version)
        changed = _sampled(bench)
    sync(bench.engine.version)
    after = _sampled(bench)
    if _alike(before, changed):
        return Verdict(
            "fail",
            "no: with other weights it says the same",
            'the engine keeps weights of its own: bring them there, or use rl.engine = "native"',
        )
    if _alike(after, changed):
        return Verdict(
            "fail",
            "once only: the old weights came back, and it says what the others made it say",
            'bring weights there as often as they change, or use rl.engine = "native"',
        )
    if not _alike(before, after):
        return Verdict(
            "warn",
            "yes; but with the old weights back, it says something else than before",
            "the engine does not keep to its seed: runs with it cannot be repeated; rl.engine "
            '= "native" does',
        )
    return Verdict("pass", "yes, and the same again when they are put back")


def keep_settings(bench: Bench) -> Verdict | None:
    """Whether another engine than ours obeys the settings of sampling that the run uses.

    At the sharpest of each, nearly all completions of a prompt must be alike (a tie may fall either
    way), and what top_k or top_p leave alone has probability 1.
    """
    if _ours(bench):
        return None
    used = ["temperature"]  # evaluation is greedy, whatever the rollouts are
    used += ["top_k"] * (bench.rl.top_k > 0) + ["top_p"] * (bench.rl.top_p < 1)
    for name in used:
        alike, certain = _sharpest(bench, SHARPEST[name])
        whole = name != "temperature" and not certain
        if alike > 0.5 and not whole:
            continue
        told = f"only {alike:.0%} of a prompt's completions are alike at its sharpest"
        return Verdict(
            "fail",
            f"{name} is ignored: {told}"
            if alike <= 0.5
            else f"log-probs are of the whole distribution, not of what {name} leaves of it",
            f"have the engine obey sampling.{name}, log-probs included; docs/engines.md says how",
        )
    return Verdict("pass", f"{', '.join(used)}: obeyed")


def _sharpest(bench: Bench, sampling: Sampling) -> tuple[float, bool]:
    """The share of completions that are their prompt's commonest, and whether all are certain."""
    prompts = [group[0].prompt for group in bench.groups[:PROBED]]
    drawn = collect(bench.engine, prompts, sampling=sampling, num_samples=REPEATS, seed=0)
    counts = [Counter(r.tokens for r in group).most_common(1)[0][1] for group in by_group(drawn)]
    certain = all(abs(p) <= OTHER_ROUNDING for rollout in drawn for p in rollout.logprobs)
    return sum(counts) / len(drawn), certain


Samples = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Tokens and their log-probs, by completion."""


def _sampled(bench: Bench) -> Samples:
    prompts = [group[0].prompt for group in bench.groups[:PROBED]]
    sampling = Sampling(max_new_tokens=2)  # at low temperatures all log-probs are 0
    rollouts = collect(bench.engine, prompts, sampling=sampling, num_samples=1, seed=0)
    return [(r.tokens, r.logprobs) for r in rollouts]


def _alike(first: Samples, second: Samples) -> bool:
    """The same tokens, with log-probs that rounding explains."""
    return all(
        a == b and all(abs(x - y) <= FLOAT32_ROUNDING for x, y in zip(p, q, strict=True))
        for (a, p), (b, q) in zip(first, second, strict=True)
    )
