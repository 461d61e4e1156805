"""Turn after turn: what an engine samples, what is replied, until nothing is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace

from posttrain.protocols import Reply
from posttrain.rollout.engines.requests import Request
from posttrain.types import Part, Prompt, Rollout, Turn

Decode = Callable[[Sequence[Request], int], dict[int, Turn]]


def converse(
    prompts: Sequence[Prompt],
    decode: Decode,
    *,
    num_samples: int,
    reply: Reply | None,
    longest: int | None = None,
    part: Part | None = None,
) -> list[list[Rollout]]:
    """``num_samples`` rollouts of each prompt: ``decode(requests, turn)`` gives their next turns.

    All have had their turn before the first has another. A rollout of more than ``longest`` tokens
    is over.
    """
    rollouts = begun(prompts, num_samples=num_samples, part=part)
    running, turn = list(rollouts), part.turn if part else 0
    while running:
        requests = [
            Request(number=n, prompt=(*rollouts[n].prompt.tokens, *rollouts[n].tokens))
            for n in running
        ]
        sampled, replies = decode(requests, turn), Replies(reply, longest=longest)
        for n in running:
            rollouts[n] = replace(rollouts[n], turns=(*rollouts[n].turns, sampled[n]))
            replies.ask(rollouts[n], n)
        answered = replies.wait_for_all()
        running, turn = [n for n in running if n in answered], turn + 1
        rollouts |= answered
    return by_prompt(rollouts, num_samples)


def begun(prompts: Sequence[Prompt], *, num_samples: int, part: Part | None) -> dict[int, Rollout]:
    """Rollouts without turns, by the numbers of their sequences.

    Sequence p·G + g is sample g of prompt p, unless ``part`` has other numbers.
    """
    asked = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(num_samples)]
    numbers = part.numbers if part else range(len(asked))
    return {
        number: Rollout(prompt=prompt, turns=(), group=group)
        for number, (group, prompt) in zip(numbers, asked, strict=True)
    }


def by_prompt(rollouts: dict[int, Rollout], num_samples: int) -> list[list[Rollout]]:
    """The rollouts of each prompt, as an engine returns them."""
    done = list(rollouts.values())
    return [done[n : n + num_samples] for n in range(0, len(done), num_samples)]


class Replies:
    """Replies to turns, some of which come later; a rollout of more than ``longest`` is over.

    ``when_done(number)`` is called, in any thread, when a reply that came later is there.
    """

    def __init__(
        self,
        reply: Reply | None,
        *,
        longest: int | None,
        when_done: Callable[[int], None] | None = None,
    ) -> None:
        self._reply, self._longest, self._when_done = reply, longest, when_done
        self._asked: dict[int, tuple[Rollout, Turn | None]] = {}
        self._later: dict[int, tuple[Rollout, Future[Turn | None]]] = {}

    @property
    def later(self) -> Collection[Future[Turn | None]]:
        """Those that have not been taken yet, of replies that come later."""
        return [future for _, future in self._later.values()]

    def ask(self, rollout: Rollout, number: int) -> None:
        """Ask for the reply to the last turn of a rollout."""
        answer = None if self._reply is None else self._reply(rollout, number)
        if not isinstance(answer, Future):
            self._asked[number] = rollout, answer
            return
        self._later[number] = rollout, answer
        if self._when_done is not None:
            tell = self._when_done
            answer.add_done_callback(lambda _: tell(number))

    def at_once(self) -> dict[int, Rollout | None]:
        """The rollouts, with their replies, that were replied to when asked; None: it is over."""
        asked, self._asked = self._asked, {}
        return {number: self._read(rollout, answer) for number, (rollout, answer) in asked.items()}

    def come(self) -> dict[int, Rollout | None]:
        """The rollouts whose replies have come since, with these; None: it is over."""
        done = [number for number, (_, future) in self._later.items() if future.done()]
        return {number: self._take(number) for number in done}

    def wait_for_all(self) -> dict[int, Rollout]:
        """The rollouts that go on, with their replies, once all are there."""
        found = self.at_once() | {number: self._take(number) for number in list(self._later)}
        return {number: rollout for number, rollout in found.items() if rollout is not None}

    def _take(self, number: int) -> Rollout | None:
        rollout, future = self._later.pop(number)
        return self._read(rollout, future.result())

    def _read(self, rollout: Rollout, answer: Turn | None) -> Rollout | None:
        """The rollout with the reply to its last turn, for another one; None where it is over."""
        if answer is None:
            return None
        if answer.sampled or not answer.tokens:
            raise ValueError(
                f"reply to prompt {rollout.prompt.id!r}: expected a turn of tokens without "
                f"logprobs, or None to end the rollout, got {answer!r}"
            )
        turns = (*rollout.turns, answer)
        length = len(rollout.prompt.tokens) + sum(len(each.tokens) for each in turns)
        too_long = self._longest is not None and length > self._longest
        return None if too_long else replace(rollout, turns=turns)
