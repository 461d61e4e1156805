"""Runs the rewards of a recipe on rollouts, and keeps wrong apart from broken."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.registry import nearest
from posttrain.rewards import REWARDS
from posttrain.rewards.bound import BoundReward, Weight, bind, checked, fitting, raised, usable
from posttrain.rewards.declared import called
from posttrain.rewards.grading import Results, Sample, grade
from posttrain.rewards.sample_data import FROM_ROLLOUT, FROM_TRL
from posttrain.types import Prompt, Rollout, Score, Turn

Specs = Mapping[Any, Weight]  # the keys are names, functions or scorers

Grader = Callable[[Sequence[BoundReward], Sequence[Sample]], list[Results]]
"""Runs functions on samples: in this process, or in a pool of others."""


class RewardScorer:
    """Scores rollouts with a weighted sum of rewards: ``value = Σ_k weight_k · reward_k``.

    ``specs`` maps a name of ``REWARDS``, a ``"module:function"``, a function itself or a scorer of
    whole batches (a reward model) to its weight, or to a table of its weight and options.
    ``Score.parts`` holds each reward's own value, unweighted, under its name. Names and options are
    checked here, in the first second. Functions run in this process unless a ``grader`` takes them
    elsewhere (:class:`posttrain.rewards.pool.GradingPool`).

    A reward that raises, or returns anything but a number of at most 1e30 or a ``Score``, makes the
    score ``invalid``, with the reason: that is never a wrong answer's 0. One of weight 0
    is only monitored: what breaks there is a missing part and a ``reason``, and ``NAME/broken`` is
    1 (0 for the others that were scored with it); the score stands. Where something else scores,
    no reward is ``needed``.

    >>> scorer = RewardScorer({"numeric": {"weight": 0.9, "extract": "tag"}, "format": 0.1})
    >>> prompt = Prompt(id="train-0", text="2+3=", columns={"answer": "5"})
    >>> scorer.check_columns(prompt)
    >>> scorer.score_text(prompt, "<answer>5</answer>").parts
    {'numeric': 1.0, 'format': 0.0}
    """

    def __init__(self, specs: Specs, *, grader: Grader = grade, needed: bool = True) -> None:
        if not specs and needed:
            raise ValueError(
                "rewards: none given; name at least one, for example {'exact': 1.0}. "
                f"Known: {', '.join(sorted(REWARDS))}, or 'module:function'"
            )
        self.rewards = tuple(bind(key, given) for key, given in specs.items())
        self.grader = grader
        self._check_names()

    def _check_names(self) -> None:
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards: two are called {name!r}; rename one of the functions")

    def joined(self, other: RewardScorer) -> RewardScorer:
        """These rewards and those of another scorer, in one."""
        both = copy.copy(self)
        both.rewards = (*self.rewards, *other.rewards)
        both._check_names()
        return both

    def with_grader(self, grader: Grader) -> RewardScorer:
        """The same rewards, run by another grader."""
        other = copy.copy(self)
        other.grader = grader
        return other

    def monitoring(self, name: str, options: Mapping[str, Any]) -> tuple[RewardScorer, str]:
        """The same rewards and one more with weight 0, and its name, changed where it is taken."""
        taken = [reward.name for reward in self.rewards]
        called = f"task:{name}" if name in taken else name
        other = copy.copy(self)
        added = replace(bind(name, {**options, "weight": 0.0}), name=called)
        other.rewards = (*self.rewards, added)
        return other, called

    @property
    def counts(self) -> bool:
        """Whether any reward has a weight, so that its score says something."""
        return not all(reward.monitored for reward in self.rewards)

    @property
    def functions(self) -> tuple[BoundReward, ...]:
        """The rewards that are functions, not scorers of whole batches."""
        return tuple(reward for reward in self.rewards if reward.kind != "scorer")

    def check_ready(self) -> None:
        """Raise ``ValueError`` where what a reward needs (a server, say) is not there."""
        for reward in self.rewards:
            function: Any = reward.function
            bound = isinstance(function, functools.partial)
            called(
                "check_ready",
                function.func if bound else function,
                kind=f"rewards.{reward.name}",
                chosen=function.keywords if bound else {},
            )

    def check_columns(self, prompt: Prompt) -> None:
        """Raise a ``ValueError`` where a reward wants a column that the prompt does not have."""
        for reward in self.rewards:
            known = {*FROM_ROLLOUT, *prompt.columns, *(FROM_TRL if reward.trl else ())}
            for name in reward.wanted:
                if name not in known and name not in reward.optional:
                    near = nearest(name, prompt.columns) or nearest(name, known, cutoff=0.8)
                    hint = f"did you mean {near!r}? Else " if near else ""
                    # The column exists, but the reward is built in and takes another name.
                    if near in prompt.columns and reward.name in REWARDS:
                        hint = f"rename {near!r} to {name!r} there, "
                    has = ", ".join(map(repr, prompt.columns))
                    has = f"its other columns: {has}" if has else "it has no other columns"
                    raise ValueError(
                        f"reward {reward.name!r}: needs the column {name!r}, which prompt "
                        f"{prompt.id!r} does not have ({has}); {hint}add the column to the "
                        "data, or choose another reward"
                    )

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, in order; never raises for what a reward did."""
        if not rollouts:
            return []
        functions = self.functions
        graded: list[Results] = [[] for _ in rollouts]
        if functions:
            graded = self.grader(functions, [self._sample(rollout) for rollout in rollouts])
        whole = {r.name: _whole(r, rollouts) for r in self.rewards if r.kind == "scorer"}
        known = {reward.name: reward for reward in self.rewards}
        everything = [
            {
                name: fitting(known[name], score, rollout=rollouts[row])
                for name, score in (*results, *((n, scores[row]) for n, scores in whole.items()))
            }
            for row, results in enumerate(graded)
        ]
        monitored = [reward.name for reward in self.rewards if reward.monitored]
        broke = {n for n in monitored if any(n in row and not row[n].ok for row in everything)}
        return [self._sum(results, broke) for results in everything]

    def score_text(self, prompt: Prompt, text: str) -> Score:
        """The score of a text as an answer to a prompt: to try a reward without a model."""
        completion = Turn(tokens=(), logprobs=(), text=text, stop_reason="stop", version=0)
        return self.score([Rollout(prompt=prompt, turns=(completion,), group=0)])[0]

    def score_sample(self, sample: Sample) -> Score:
        """The score of the data of one rollout, by functions alone, in this process."""
        return self._sum(dict(grade(self.functions, [sample])[0]), ())

    def _sample(self, rollout: Rollout) -> Sample:
        """The data of a rollout that the rewards take, and no more."""
        columns, functions = rollout.prompt.columns, self.functions
        wanted = dict.fromkeys(name for reward in functions for name in reward.wanted)
        trl = any(reward.trl for reward in functions)
        if any(reward.every for reward in functions):
            wanted |= dict.fromkeys((*FROM_ROLLOUT, *(FROM_TRL if trl else ()), *columns))
        sources = {**FROM_ROLLOUT, **(FROM_TRL if trl else {})}
        known = {name: sources[name](rollout) for name in wanted if name in sources}
        return known | {n: columns[n] for n in wanted if n not in known and n in columns}

    def _sum(self, results: Mapping[str, Score], broke: Collection[str]) -> Score:
        """The weighted sum; the first broken score, in the order of the rewards, is the verdict.

        ``broke`` are the monitored rewards that broke on some of the rollouts scored together.
        """
        parts: dict[str, float] = {}
        terms: list[float] = []
        tokens: list[list[float]] = []
        known = [(r, results[r.name]) for r in self.rewards if r.name in results]
        for reward, result in known:
            if reward.name in broke:
                parts[f"{reward.name}/broken"] = float(not result.ok)
            if result.ok:
                parts[reward.name] = result.value
                parts.update({f"{reward.name}/{name}": part for name, part in result.parts.items()})
                terms.append(reward.weight * result.value)
                if result.token_rewards and not reward.monitored:
                    tokens.append([reward.weight * each for each in result.token_rewards])
        reasons = sorted((score for _, score in known if score.reason), key=lambda score: score.ok)
        reason = reasons[0].reason if reasons else ""  # a broken score's reason comes first
        value, state, details = 0.0, "ok", ""
        broken = next((score for r, score in known if not score.ok and not r.monitored), None)
        if broken is not None:
            state, reason, details = broken.state, broken.reason, broken.details
        elif all(r.monitored for r, _ in known) and not all(r.monitored for r in self.rewards):
            state, reason = "invalid", "no reward applies: each of them returned None"
        else:
            try:
                value = usable(math.fsum(terms))
            except (ValueError, OverflowError) as error:
                state, reason = "invalid", f"the weighted sum of {parts} is {error}"
        return Score(
            value=value,
            state=state,  # type: ignore[arg-type]
            parts=parts,
            reason=reason,
            details=details,
            seconds=sum(score.seconds for score in results.values()),
            token_rewards=tuple(map(math.fsum, zip(*tokens, strict=True))) if state == "ok" else (),
        )


def _whole(reward: BoundReward, rollouts: Sequence[Rollout]) -> list[Score]:
    """The scores of a scorer of whole batches; where it raises, every score is broken."""
    try:
        assert not callable(reward.function)
        scores = reward.function.score(rollouts)
        if len(scores) != len(rollouts):
            raise ValueError(f"gave {len(scores)} scores for {len(rollouts)} rollouts")
    except KeyboardInterrupt:  # Ctrl-C, not an error of the scorer
        raise
    except BaseException as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
        return [raised(reward, error)] * len(rollouts)
    return [checked(reward, score) for score in scores]
