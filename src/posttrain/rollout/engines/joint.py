"""The native engine for several adapters: what all of them ask is sampled in one batch.

Every sequence has the randomness of its own adapter's call, so what it draws is what it would have
drawn if that adapter had been sampled alone, but for sums that are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.models import head
from posttrain.models.adapter_group import AdapterGroup, OwnTokens
from posttrain.protocols import Learner, Reply, Sync
from posttrain.rollout.engines.draws import uniforms
from posttrain.rollout.engines.local import samples_alone
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.taking_turns import Turns
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn
from posttrain.types.ways import Way


@dataclass(frozen=True, kw_only=True)
class JointCall:
    """A call of :meth:`posttrain.protocols.Engine.generate` by one adapter."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    num_samples: int
    seed: int
    reply: Reply | None
    part: Part | None
    version: int


@dataclass(frozen=True)
class _Sequence:
    """A sequence of a joint call: whose it is, and its number in the call of its adapter."""

    adapter: int
    asked: JointCall
    number: int


class JointEngine(NativeEngine):
    """Samples for all adapters of a group at once; each of them has a :class:`MemberEngine`."""

    def __init__(self, group: AdapterGroup, **options: Any) -> None:
        self._own = group.model
        super().__init__(group.sampled, rounds=self.alone, **options)
        # What the model can do is tried now, and remembered: a trial chooses no adapters.
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        head.logits_are_head_of_states(self.model, token)
        self._decoder.takes_model()
        self._sequences: list[_Sequence] = []

    @property
    def alone(self) -> bool:
        """As each adapter would be sampled by itself."""
        return samples_alone(self._own)

    def answer(self, asked: Mapping[int, JointCall]) -> dict[int, list[list[Rollout]] | Exception]:
        """What each adapter's call gives, or what it raises."""
        alike: dict[Any, dict[int, JointCall]] = {}
        for adapter, call in asked.items():
            alike.setdefault((call.sampling, call.reply is None), {})[adapter] = call
        found: dict[int, list[list[Rollout]] | Exception] = {}
        for calls in alike.values():
            try:
                found |= self._together(calls)
            except (ValueError, RuntimeError) as error:
                # Environments that have gone on cannot be asked the same again.
                if len(calls) == 1 or any(call.reply is not None for call in calls.values()):
                    found |= dict.fromkeys(calls, error)
                    continue
                for adapter, call in calls.items():  # one may have diverged, and not the others
                    found |= self.answer({adapter: call})
        return found

    def _together(self, calls: Mapping[int, JointCall]) -> dict[int, list[list[Rollout]]]:
        self._sequences = [
            _Sequence(adapter, call, number)
            for adapter, call in calls.items()
            for number in (call.part.numbers if call.part else range(_count(call)))
        ]
        prompts = [
            prompt
            for call in calls.values()
            for prompt in call.prompts
            for _ in range(call.num_samples)
        ]
        first = next(iter(calls.values()))
        reply = None if first.reply is None else self._reply
        done = iter(self.generate(prompts, first.sampling, num_samples=1, seed=0, reply=reply))
        return {
            adapter: [
                [_as_asked(next(done)[0], group=group, call=call) for _ in range(call.num_samples)]
                for group in range(len(call.prompts))
            ]
            for adapter, call in calls.items()
        }

    def _reply(self, rollout: Rollout, number: int) -> Any:
        own = self._sequences[number]
        assert own.asked.reply is not None
        return own.asked.reply(rollout, own.number)

    def uniforms(self, seed: int, *, sequences: Sequence[int], num_steps: int, turn: int) -> Tensor:
        """Each sequence draws what it draws in the call of its adapter."""
        own = [self._sequences[number] for number in sequences]
        return torch.cat(
            [
                uniforms(
                    each.asked.seed,
                    sequences=[each.number],
                    num_steps=num_steps,
                    turn=turn + (each.asked.part.turn if each.asked.part else 0),
                )
                for each in own
            ]
        )

    def read_by(self, number: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens as the adapter of this sequence reads them."""
        return OwnTokens(tokens, self._sequences[number].adapter)


class MemberEngine:
    """The engine of one adapter: what it asks is sampled once all that run have asked."""

    def __init__(
        self, member: int, joint: JointEngine, *, group: AdapterGroup, turns: Turns[Any, Any]
    ) -> None:
        self.version, self._alone = 0, False
        self._member, self._joint, self._group, self._turns = member, joint, group, turns

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        reply: Reply | None = None,
        part: Part | None = None,
    ) -> list[list[Rollout]]:
        """``num_samples`` rollouts of each prompt by this adapter as it is now."""
        self._joint.check(prompts, sampling, num_samples=num_samples)
        self._group.publish(self._member)
        asked = JointCall(
            prompts=prompts,
            sampling=sampling,
            num_samples=num_samples,
            seed=seed,
            reply=reply,
            part=part,
            version=self.version,
        )
        if not self._alone:
            found: list[list[Rollout]] = self._turns.ask(self._member, asked)
            return found
        answer = self._joint.answer({self._member: asked})[self._member]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, it samples at once: no other may run while weights that all share are changed."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def sync(self, learner: Learner) -> Sync:
        """Nothing: every call takes the weights along."""
        return SharedWeights(self)

    def way(self) -> Way:
        """As all adapters together are sampled."""
        return self._joint.way()

    def close(self) -> None:
        """Others may still sample."""


def _count(call: JointCall) -> int:
    return len(call.prompts) * call.num_samples


def _as_asked(rollout: Rollout, *, group: int, call: JointCall) -> Rollout:
    def own(turn: Turn) -> Turn:
        return replace(turn, version=call.version) if turn.sampled else turn

    return replace(rollout, group=group, turns=tuple(own(turn) for turn in rollout.turns))
