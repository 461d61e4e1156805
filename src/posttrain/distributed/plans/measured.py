"""What a step costs on one engine and one learner: from a run that was made, or from a trial."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from posttrain.distributed.plans.simulate import LEARNING, Costs, Line
from posttrain.rollout.collect import collect
from posttrain.runs import RunFolder
from posttrain.runs.rollouts import rollout_table
from posttrain.track.printable import counted
from posttrain.track.progress import phase

WARM_UP = 2  # first steps of a run, in which memory is taken and kernels are compiled
MOST_STEPS = 200  # newest ones of a run that are read
FEWEST_STEPS = 4
SPREAD = 0.05  # standard deviation / mean of sizes, below which a line through them is a guess


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs, the share of groups that dynamic sampling keeps, and how all of it was found."""

    costs: Costs
    useful: float = 1.0
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Observed:
    """Seconds that were spent on ``fixed`` passes and ``each`` units of work."""

    fixed: float
    each: float
    seconds: float


def fit(observed: Sequence[Observed]) -> Line:
    """The costs of a pass and of a unit, neither negative, by least squares; half are slower.

    >>> fit([Observed(2, 10, 7.0), Observed(2, 30, 17.0)])
    Line(fixed=1.0, each=0.5)
    """
    aa = sum(row.fixed**2 for row in observed)
    bb = sum(row.each**2 for row in observed)
    ab = sum(row.fixed * row.each for row in observed)
    at = sum(row.fixed * row.seconds for row in observed)
    bt = sum(row.each * row.seconds for row in observed)
    alone = [Line(at / aa if aa else 0.0, 0.0), Line(0.0, bt / bb if bb else 0.0)]
    determinant = aa * bb - ab**2
    both = alone[1]
    if determinant > 1e-9 * aa * bb:
        both = Line((at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant)
    if min(both) < 0:
        both = min(alone, key=lambda line: sum(_error(line, row) ** 2 for row in observed))
    ratios = [row.seconds / spent for row in observed if (spent := _spent(both, row)) > 0]
    scale = statistics.median(ratios) if ratios else 1.0
    return Line(scale * both.fixed, scale * both.each)


def _spent(line: Line, row: Observed) -> float:
    return line.fixed * row.fixed + line.each * row.each


def _error(line: Line, row: Observed) -> float:
    return _spent(line, row) - row.seconds


def _guessed(observed: Sequence[Observed]) -> bool:
    """Whether all have nearly the same work per pass, so that a pass and a unit look alike."""
    ratios = [row.each / row.fixed for row in observed if row.fixed]
    mean = statistics.fmean(ratios) if ratios else 0.0
    return len(ratios) < FEWEST_STEPS or statistics.pstdev(ratios) < SPREAD * mean


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
    learners, engines = cluster.get("learners", 1), max(1, cluster.get("engines", 0))
    decode, train, groups, prompts = [], [], [], []
    graded = 0.0
    for record in known:
        asked, lengths = _lengths(stage.rollouts, int(record["step"]))
        samples, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
        drawn = 1 + record["rollout/resampled"] / len(lengths)  # groups for each that was learned
        passes = math.ceil(drawn) * max(map(max, lengths))  # dropped groups: another round or more
        decode.append(Observed(passes, drawn * tokens / engines, record["time/rollout"]))
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


def _train_line(rl: RlSection, less: Trial, *, more: Trial) -> Line:
    """A whole step of the loop by its tokens: log-probs where they are needed, then every epoch."""

    def line(name: str) -> LinearCost:
        return LinearCost.through(
            (less.tokens, getattr(less, name)), (more.tokens, getattr(more, name))
        )

    infer, step = line("infer_seconds"), line("step_seconds")
    inferred = float(make_plan(rl).needs_inference)
    return Line(
        inferred * infer.fixed + rl.epochs * rl.minibatches * step.fixed,
        inferred * infer.each + rl.epochs * step.each,
    )


def weight_moves(rl: RlSection) -> int:
    """How often learners exchange all weights for a micro-batch of a step.

    Three times for each epoch (forward, backward, gradients), once for π_old, once for π_ref.
    """
    asked = make_plan(rl).needs_inference
    return LEARNING * rl.epochs + asked + (rl.kl.placement != "none")


def shown(measured: Measured) -> Iterable[str]:
    """What was measured, in words."""
    costs = measured.costs
    lengths = sorted(itertools.chain.from_iterable(costs.groups))
    yield from measured.notes
    yield (
        f"a decoding pass {_ms(costs.decode.fixed)} + {_ms(costs.decode.each)} a sequence; "
        f"grading {_ms(costs.grading)} a completion"
    )
    yield f"a step {_ms(costs.train.fixed)} + {1e3 * costs.train.each:.3g} ms a token"
    middle, most = lengths[len(lengths) // 2], lengths[-1]
    yield (
        f"completions of {statistics.fmean(lengths):.0f} tokens (median {middle}, at most {most}, "
        f"{len(lengths):,} seen), prompts of {costs.prompt:.0f}; weights of {_size(costs)}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _size(costs: Costs) -> str:
    size: Any = costs.weight_bytes
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
