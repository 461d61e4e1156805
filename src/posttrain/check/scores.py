"""Do the rewards work? What they take, whether they break, whether they tell answers apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.build.scoring import make_scorer
from posttrain.check.answers import claims, earned, scores
from posttrain.check.bench import Bench
from posttrain.check.verdicts import State, Verdict
from posttrain.config.specs import MODEL_REWARD
from posttrain.models.reward_scorer import ModelScorer
from posttrain.rewards.bound import BoundReward
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Rollout

CODE_REWARD = "code"
SLOW_STEP = 60.0  # seconds of grading in a step that get a warning


def functions(bench: Bench) -> list[BoundReward]:
    """The rewards, where they are functions and not a scorer of whole batches."""
    return list(bench.scorer.rewards) if isinstance(bench.scorer, RewardScorer) else []


def choose_sandbox(bench: Bench) -> Verdict | None:
    """Which sandbox is used; raises where none is available."""
    if not any(reward.name == CODE_REWARD for reward in functions(bench)):
        return None
    from posttrain.sandbox import available, choose

    own = dict(bench.task.rewards).get(CODE_REWARD, {})
    given = bench.recipe.rewards.get(CODE_REWARD) or (own if isinstance(own, dict) else {})
    chosen = choose(str(given.get("sandbox", "auto")))  # type: ignore[arg-type]
    isolates = {backend.name: backend.isolates for backend in available()}[chosen]
    return Verdict(
        "warn" if chosen == "none" else "pass",
        f"{chosen}: isolates {isolates}",
        'install bubblewrap and set the option sandbox of the reward "code" to "auto"',
    )


def tell_signatures(bench: Bench) -> Iterator[Verdict]:
    """How rewards are called whose signature is another than ours."""
    for reward in functions(bench):
        if reward.signature:
            yield Verdict("pass", f"{reward.name}: {reward.signature}")


def name_models(bench: Bench) -> Iterator[Verdict]:
    """The reward models, and the stand-in for one that is still to be trained."""
    if bench.stand_in:
        names = ", ".join(reward.name for reward in functions(bench))
        yield Verdict(
            "warn",
            f"the stage reward is still to make it; here {names} stands in for it",
            "nothing to do; check a recipe of [rl] alone once the reward model is there",
        )
    for scorer in reward_models(bench):
        size = sum(weight.numel() for weight in scorer.reward.model.parameters())
        name = Path(scorer.reward.source).name
        yield Verdict("pass", f"{name}: {size:,} weights, loaded")


def reward_models(bench: Bench) -> list[ModelScorer]:
    """The rewards that are models."""
    found = [reward.function for reward in functions(bench)]
    return [function for function in found if isinstance(function, ModelScorer)]


def find_ready(bench: Bench) -> None:
    """Raise where what a reward of the stages to come needs (a server, say) is not there."""
    scorer = bench.setup.scorer
    if isinstance(scorer, RewardScorer) and {"rl", "eval"} & {*bench.stages}:
        scorer.check_ready()
    given = bench.recipe.prefer.rewards if "prefer" in bench.stages else {}
    named = {name: options for name, options in given.items() if name != MODEL_REWARD}
    if named:
        annotator = make_scorer(named, bench.template, device=bench.setup.device)
        try:
            annotator.check_ready()
        except ValueError as error:
            raise ValueError(f"prefer.{error}") from None
    bench.ready = True


def time_grading(bench: Bench) -> Verdict | None:
    """Seconds of a completion, and of a step."""
    seconds = [r.score.seconds for r in bench.known if r.score is not None]
    if not seconds:
        return None
    grading = bench.recipe.grading
    state: State = "pass"
    middle, most = statistics.median(seconds), max(seconds)
    text = f"{_time(middle)} each in the median of {len(seconds)} known answers, "
    text += f"{_time(most)} at most"
    if bench.has("rl"):
        rl = bench.rl
        step = middle * rl.prompts_per_step * rl.group_size / max(1, grading.workers)
        text += f": {_time(step)} a step by that median"
        state = "warn" if step > SLOW_STEP or most > grading.seconds / 2 else "pass"
    fix = "raise grading.workers, or make the reward faster; grading.seconds is the limit"
    return Verdict(state, text, fix)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count_broken(bench: Bench) -> Verdict:
    """How many known answers the rewards could not score."""
    share, text = _broken(bench.known)
    lost, _ = _broken(bench.answers.get("gold", ()))
    allowed = bench.rl.max_invalid if bench.has("rl") else 0.0
    return Verdict(
        # Only gold answers must not break: empty and wrong ones may be unlike any real completion.
        "fail" if share == 1 or lost > allowed else "warn" if share else "pass",
        text,
        "fix the reward: a score that breaks is left out, and too many stop the run",
    )


def count_broken_rollouts(bench: Bench) -> Verdict | None:
    """How many real rollouts the rewards could not score; a line only where there are some."""
    share, text = _broken(bench.rollouts, what=" real rollouts")
    fix = f"fix {bench.to_fix}: above rl.max_invalid the run stops"
    state: State = "fail" if share > bench.rl.max_invalid else "warn"
    return Verdict(state, text, fix) if share else None


def _broken(rollouts: Sequence[Rollout], *, what: str = "") -> tuple[float, str]:
    """The share of scores that broke, and that in words."""
    found = [r.score for r in rollouts if r.score is not None]
    broken = [score for score in found if not score.ok]
    share = len(broken) / max(1, len(found))
    reason = f"; the first: {broken[0].reason}" if broken else ""
    return share, f"{share:.0%} of {len(found)}{what}{reason}"


def tell_apart(bench: Bench) -> Verdict | None:
    """Mean scores of gold, wrong and empty answers, which should differ."""
    if bench.known and not scores(bench.known):
        return None
    found = {kind: earned(bench, kind) for kind in ("gold", "wrong", "empty")}
    known = {kind: statistics.fmean(each.values()) for kind, each in found.items() if each}
    text = ", ".join(f"{kind} {value:.2f}" for kind, value in known.items())
    if bench.env_scores or not claims(bench):
        why = "no reward learned from reads the answer"
        why = "the environment scores" if bench.env_scores else why
        return Verdict("pass", f"not asked to, {why}: {text}")
    if "gold" not in known or len(known) < 2:
        return Verdict(
            "pass", "unknown without gold answers; see the signal of real rollouts below"
        )
    best = max(value for kind, value in known.items() if kind != "gold")
    if known["gold"] > best:
        return Verdict("pass", text)
    if known["gold"] == best:
        return Verdict(
            "fail",
            f"no: on average {text}",
            "fix the reward: right and wrong must differ, or there is nothing to learn from",
        )
    clear = any(_clearly_above(found[kind], found["gold"]) for kind in ("wrong", "empty"))
    by_chance = f"not on these {len(found['gold'])} prompts: on average {text}, perhaps by chance"
    return Verdict(
        "fail" if clear else "warn",
        f"the wrong way round: on average {text}" if clear else by_chance,
        "flip the sign of a weight in [rewards], or fix the reward",
    )


def _clearly_above(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether the mean difference over shared prompts is more than two of its standard errors."""
    pairs = [one[prompt] - other[prompt] for prompt in one if prompt in other]
    if len(pairs) < 2:
        return False  # one pair has no error to compare with
    return statistics.fmean(pairs) > 2 * statistics.stdev(pairs) / math.sqrt(len(pairs))
