"""Partial rollouts: a completion is sampled over several updates, some tokens under each.

    call      0       1       2       3          partial = 2: at most half of max_new_tokens a call
    batch 0   whole
    batch 1   begun ─ rest
    batch 2           begun ─ rest
    batch 3                   begun ─ rest

A call begins a batch, goes on with those under way, all at once, and hands out the oldest; new
weights come between two calls. So the longest completions hold up no update: they go on beside the
first tokens of the next batch (Kimi k1.5, arXiv:2501.12599, section 2.6.2). What a call takes is a
matter of tokens, never of time, so a run repeats bit for bit.

A completion goes on from its tokens: the new weights read them again, and no key or value of the
old ones stays. So the log-prob of each token is that of its version's policy, given all before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from posttrain.models.stops import Decode
from posttrain.protocols import Engine, Scorer
from posttrain.rollout.collect import RolloutSource, takes
from posttrain.rollout.engines.draws import sampled_turns
from posttrain.types import Collected, Part, Rollout, Turn, draw_seed


class PartialSource(RolloutSource):
    """Batches whose completions are sampled in ``partial`` calls of the engine at most.

    Of a completion ``max_new_tokens / partial`` tokens are sampled in a call, at most. The first
    batches, for which no earlier call was, take all that they need in theirs. ``end_tokens`` and
    ``decode`` are the policy's; it knows no environment, greedy completions or resampling.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        *,
        partial: int,
        end_tokens: Sequence[int],
        decode: Decode,
        **options: Any,
    ) -> None:
        super().__init__(engine, scorer, **options)
        if not takes(engine, "part"):
            raise ValueError(
                f"engine {type(engine).__name__}: its generate has no parameter part, which "
                "completions that go on need; set rl.partial to 1, or add it (docs/engines.md)"
            )
        self._partial, self._end_tokens, self._decode = partial, end_tokens, decode

    def steps(self, count: int) -> Iterator[Collected]:
        """The rollouts of ``count`` steps."""
        for left in range(count, 0, -1):
            yield self._call(min(self._partial, left))

    def _call(self, under_way: int) -> Collected:
        """Go on with so many batches, and hand out the oldest."""
        begun = time.perf_counter()
        batches = list(self.unfinished)
        while len(batches) < under_way:
            batches.append(self._begin())
        due, *others = self._sampled(batches)
        sampled = time.perf_counter()
        scores = self._scorer.score(due.rollouts)
        self.unfinished = tuple(others)
        return replace(
            due,
            rollouts=[replace(r, score=s) for r, s in zip(due.rollouts, scores, strict=True)],
            seconds={"rollout": sampled - begun, "reward": time.perf_counter() - sampled},
            num_calls=self.num_calls,
            unfinished=self.unfinished,
        )

    def _begin(self) -> Collected:
        """A batch of prompts without a token sampled."""
        rollouts = [
            Rollout(prompt=prompt, turns=(), group=group)
            for group, prompt in enumerate(self.prompts.take(self._prompts_per_step))
            for _ in range(self._group_size)
        ]
        return Collected(rollouts=rollouts, position=self.prompts.position)

    def _sampled(self, batches: Sequence[Collected]) -> list[Collected]:
        """The batches with as many tokens as a call may add; the first with all of them."""
        most = self._sampling.max_new_tokens
        rollouts = [rollout for batch in batches for rollout in batch.rollouts]
        size = len(batches[0].rollouts)
        running: dict[int, list[int]] = {}  # numbers of sequences, by the tokens they may draw
        for number, rollout in enumerate(rollouts):
            left = most - len(rollout.tokens)
            if left and (not rollout.turns or rollout.stop_reason == "length"):
                budget = left if number < size else most // self._partial
                running.setdefault(budget, []).append(number)
        for budget, numbers in running.items():
            answers = self._engine.generate(
                [_to_read(rollouts[number]) for number in numbers],
                replace(self._sampling, max_new_tokens=budget),
                num_samples=1,
                seed=draw_seed(self._seed, self.num_calls),
                part=Part(numbers=tuple(numbers)),
            )
            self.num_calls += 1
            for number, (found,) in zip(numbers, answers, strict=True):
                turn = self._joined(*rollouts[number].turns, *found.turns)
                rollouts[number] = replace(rollouts[number], turns=(turn,), engine=found.engine)
        return [
            replace(batch, rollouts=rollouts[n * size : (n + 1) * size])
            for n, batch in enumerate(batches)
        ]

    def _joined(self, first: Turn, *more: Turn) -> Turn:
        """One turn of those that follow each other, each token with its version.

        A stop string may begin in the one and end in the other: it is looked for in the whole.
        """
        if not more:
            return first
        turns = (first, *more)
        tokens = [token for turn in turns for token in turn.tokens]
        logprobs = [known for turn in turns for known in turn.logprobs or ()]
        (whole,) = sampled_turns(
            torch.tensor([tokens]),
            torch.tensor([logprobs], dtype=torch.float64),
            lengths=[len(tokens)],
            end_tokens=self._end_tokens,
            decode=self._decode,
            version=first.version,
            stop=self._sampling.stop,
        )
        versions = [version for turn in turns for version in turn.token_versions]
        return replace(whole, versions=tuple(versions[: len(whole.tokens)]))


def _to_read(rollout: Rollout) -> Any:
    """The prompt with what was sampled behind it, as an engine reads it."""
    return replace(rollout.prompt, tokens=(*rollout.prompt.tokens, *rollout.tokens))
