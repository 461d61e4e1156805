"""The costs of a step, from a few rollouts and two steps on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from posttrain.build.algorithm import make_plan
from posttrain.build.sampler import make_sampling
from posttrain.build.setup import Supplied
from posttrain.build.threads import own_threads
from posttrain.check.bench import Bench
from posttrain.check.checklist import run_checks
from posttrain.check.resources import num_bytes
from posttrain.check.signal import useful
from posttrain.check.trial import LinearCost, Trial
from posttrain.config import Recipe, RlSection
from posttrain.distributed.plans.measured import Measured, Observed, fit
from posttrain.distributed.plans.simulate import Costs, LinearTime
from posttrain.rollout.collect import collect
from posttrain.track.progress import phase


def from_trial(
    read: Callable[[], Recipe], *, fast: bool = False, supplied: Supplied | None = None
) -> Measured:
    """The costs of a few rollouts and two steps on this machine, as a check takes them."""
    bench = Bench("check", fast=fast, supplied=supplied)
    bench.read = read
    with own_threads():
        try:
            lines = run_checks(bench)
            if not bench.has("less groups"):
                failed = next((line for line in lines if line.state == "fail"), None)
                why = f"{failed.name}: {failed.text}; {failed.fix}" if failed else "nothing sampled"
                raise ValueError(f"plan: the recipe could not be tried ({why})")
            return _of_trial(bench)
        finally:
            bench.close()
            if bench.has("setup"):
                bench.setup.close()


def _of_trial(bench: Bench) -> Measured:
    rl, rollouts = bench.rl, bench.rollouts
    decode = [_sampled(bench, count) for count in (max(1, len(bench.groups) // 8), None)]
    less, more = bench.less, bench.trial
    weights = num_bytes(bench.policy.model.parameters())
    rows = [len(group) for group in bench.groups]
    return Measured(
        costs=Costs(
            decode=fit(decode),
            grading=bench.seconds["reward"] / len(rollouts),
            train=_train_line(rl, less, more=more),
            weight_bytes=weights,
            groups=[[max(1, len(r.tokens)) for r in group] for group in bench.groups],
            prompt=statistics.fmean(len(r.prompt.tokens) for r in rollouts),
        ),
        useful=max(1, useful(bench.groups)) / len(bench.groups) if rl.dynamic_sampling else 1.0,
        notes=(
            f"measured here, on {bench.setup.device}: {rows[0]} to {sum(rows)} completions at once,"
            f" steps on {less.sequences} and {more.sequences} of them",
            *(["lengths are those of the model before its stage sft"] if bench.untrained else []),
        ),
    )


def _sampled(bench: Bench, count: int | None) -> Observed:
    """Seconds of sampling so many groups; the second of two times, after warm-up."""
    prompts = [group[0].prompt for group in bench.groups[:count]]
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        with phase("measuring: sampling"):
            found = collect(
                bench.engine,
                prompts,
                sampling=make_sampling(bench.rl),
                num_samples=len(bench.groups[0]),
                seed=bench.recipe.run.seed,
            )
        seconds = time.perf_counter() - begun
    lengths = [len(rollout.tokens) for rollout in found]
    return Observed(max(lengths), sum(lengths), seconds)


def _train_line(rl: RlSection, less: Trial, *, more: Trial) -> LinearTime:
    """A whole step of the loop by its tokens: log-probs where they are needed, then every epoch."""

    def line(name: str) -> LinearCost:
        return LinearCost.through(
            (less.tokens, getattr(less, name)), (more.tokens, getattr(more, name))
        )

    infer, step = line("infer_seconds"), line("step_seconds")
    inferred = float(make_plan(rl).needs_inference)
    return LinearTime(
        inferred * infer.fixed + rl.epochs * rl.minibatches * step.fixed,
        inferred * infer.each + rl.epochs * step.each,
    )
