"""Runs the rewards of a recipe on rollouts, and keeps wrong apart from broken."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.protocols import Reward, Scorer
from posttrain.registry import check_options, did_you_mean, look_up, options
from posttrain.rewards import REWARDS
from posttrain.types import Completion, Prompt, Rollout, Score

Weight = float | Mapping[str, Any]
Specs = Mapping[Any, Weight]  # the keys are names or functions

# What a reward may ask for besides the prompt's columns.
FROM_ROLLOUT: dict[str, Callable[[Rollout], Any]] = {
    "prompt": lambda rollout: _question(rollout.prompt),
    "completion": lambda rollout: rollout.completion.text,
    "num_tokens": lambda rollout: len(rollout.completion.tokens),
    "stop_reason": lambda rollout: rollout.completion.stop_reason,
}
MAX_REASON_LENGTH = 500


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """One reward of a recipe: its options bound, the data it wants known by name."""

    name: str
    weight: float
    function: Reward | Scorer
    wanted: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()


class RewardScorer:
    """Scores rollouts with a weighted sum of rewards: ``value = Σ_k weight_k · reward_k``.

    ``specs`` maps a name of ``REWARDS``, a ``"module:function"``, a function itself or a scorer of
    whole batches (a reward model) to its weight, or to a table of its weight and options.
    ``Score.parts`` holds each reward's own value, unweighted, under its name; a weight of 0 only
    watches. Names and options are checked here, in the first second.

    A reward that raises, or returns anything but a finite number or a ``Score``, makes the score
    ``invalid``, with the reason: that is never a wrong answer's 0.

    >>> scorer = RewardScorer({"numeric": {"weight": 0.9, "extract": "tag"}, "format": 0.1})
    >>> prompt = Prompt(id="train-0", text="2+3=", columns={"answer": "5"})
    >>> scorer.check_columns(prompt)
    >>> scorer.score_text(prompt, "<answer>5</answer>")
    Score(value=0.9, state='ok', parts={'numeric': 1.0, 'format': 0.0}, reason='')
    """

    def __init__(self, specs: Specs) -> None:
        if not specs:
            raise ValueError(
                "rewards: none given; name at least one, for example {'exact': 1.0}. "
                f"Known: {', '.join(sorted(REWARDS))}, or 'module:function'"
            )
        self.rewards = tuple(_bind(key, given) for key, given in specs.items())
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards: two are called {name!r}; rename one of the functions")

    def check_columns(self, prompt: Prompt) -> None:
        """Raise a ``ValueError`` where a reward wants a column that the prompt does not have."""
        known = {*FROM_ROLLOUT, *prompt.columns}
        for reward in self.rewards:
            for name in reward.wanted:
                if name not in known and name not in reward.optional:
                    raise ValueError(
                        f"reward {reward.name!r}: wants the column {name!r}, which prompt "
                        f"{prompt.id!r} does not have; {did_you_mean(name, known)}. Add the column "
                        "to the data, or choose another reward"
                    )

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, in order; never raises for what a reward did."""
        batched = {
            reward.name: reward.function.score(rollouts)
            for reward in self.rewards
            if not callable(reward.function)
        }
        return [
            self._score_one(rollout, {name: scores[row] for name, scores in batched.items()})
            for row, rollout in enumerate(rollouts)
        ]

    def score_text(self, prompt: Prompt, text: str) -> Score:
        """The score of a text as an answer to a prompt: to try a reward without a model."""
        completion = Completion(tokens=(), logprobs=(), text=text, stop_reason="stop", version=0)
        return self.score([Rollout(prompt=prompt, completion=completion, group=0)])[0]

    def _score_one(self, rollout: Rollout, batched: Mapping[str, Score]) -> Score:
        parts: dict[str, float] = {}
        terms: list[float] = []
        for reward in self.rewards:
            found = batched.get(reward.name)
            result = _run(reward, rollout) if found is None else _checked(reward, found)
            if not result.ok:
                return Score(value=0.0, state=result.state, parts=parts, reason=result.reason)
            parts[reward.name] = result.value
            parts.update({f"{reward.name}/{name}": part for name, part in result.parts.items()})
            terms.append(reward.weight * result.value)
        value = math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan
        if not math.isfinite(value):
            reason = f"the weighted sum of {parts} is not a finite number"
            return Score(value=0.0, state="invalid", parts=parts, reason=reason)
        return Score(value=value, parts=parts)


def _bind(key: str | Reward | Scorer, given: Weight) -> BoundReward:
    name = key if isinstance(key, str) else _name(key)
    kind = f"reward {name!r}"
    function = look_up(key, REWARDS, kind="reward") if isinstance(key, str) else key
    if not callable(function) and not hasattr(function, "score"):
        raise ValueError(f"rewards: expected names, functions or scorers, got {key!r}")
    chosen = dict(given) if isinstance(given, Mapping) else {"weight": given}
    weight = chosen.pop("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
        raise ValueError(f"{kind}: the weight must be a finite number, got {weight!r}")
    if not callable(function):
        if chosen:
            raise ValueError(f"{kind}: a scorer has its options already, got {chosen}")
        return BoundReward(name=name, weight=float(weight), function=function)
    wanted, optional = _wanted(function, kind)
    if "weight" in options(function):
        raise ValueError(f"{kind}: rename its option 'weight'; that word sets the reward's weight")
    check_options(function, chosen, kind=kind)
    return BoundReward(
        name=name,
        weight=float(weight),
        function=functools.partial(function, **chosen) if chosen else function,
        wanted=wanted,
        optional=optional,
    )


def _name(key: Any) -> str:
    return str(getattr(key, "__name__", "") or getattr(key, "name", "") or type(key).__name__)


def _wanted(function: Reward, kind: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The data a reward takes, by name, and which of it has a default."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    ):
        raise ValueError(f"{kind}: is async; make it a plain function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}: its parameters cannot be read; wrap it in a def") from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"{kind}: takes {parameter}; name the data it needs instead, for example "
                "`def reward(completion, answer)`, because data is passed by parameter name"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{kind}: {parameter.name!r} is positional-only; remove the `/`")
    data = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = frozenset(p.name for p in data if p.default is not p.empty)
    return tuple(p.name for p in data), optional


def _run(reward: BoundReward, rollout: Rollout) -> Score:
    """What one reward says about one rollout, checked."""
    assert callable(reward.function), "scorers are asked about the whole batch"
    try:
        return _checked(reward, reward.function(**_data(reward, rollout)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
        what = traceback.format_exception_only(error)[-1].strip()
        return _invalid(reward, f"raised {what}"[:MAX_REASON_LENGTH] + f" ({_place(error)})")


def _data(reward: BoundReward, rollout: Rollout) -> dict[str, Any]:
    columns = rollout.prompt.columns
    data = {}
    for name in reward.wanted:
        if name in FROM_ROLLOUT:
            data[name] = FROM_ROLLOUT[name](rollout)
        elif name in columns:
            data[name] = columns[name]
        elif name not in reward.optional:
            raise KeyError(f"prompt {rollout.prompt.id!r} has no column {name!r}")
    return data


def _checked(reward: BoundReward, result: Any) -> Score:
    score = result if isinstance(result, Score) else None
    value = score.value if score is not None else result
    if score is not None and not score.ok:
        return Score(value=0.0, state=score.state, reason=f"reward {reward.name!r}: {score.reason}")
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # a number in numpy's or torch's clothes
    if not isinstance(value, numbers.Real):
        kind = "None" if value is None else f"a {type(value).__name__}"
        return _invalid(reward, f"returned {kind}, not a number; return a float")
    if not math.isfinite(value):
        return _invalid(reward, f"returned {value}, not a finite number")
    return Score(value=float(value), parts=score.parts if score is not None else {})


def _invalid(reward: BoundReward, reason: str) -> Score:
    return Score(value=0.0, state="invalid", reason=f"reward {reward.name!r} {reason}")


def _place(error: BaseException) -> str:
    """The line that raised: in the reward's own file where it is there, else the innermost."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = frames[1:] or frames  # the first is _run
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _question(prompt: Prompt) -> str:
    """The text of a prompt; of a chat, the last message."""
    return prompt.text or (prompt.messages[-1]["content"] if prompt.messages else "")
