"""Turn after turn: what an engine samples, what is replied, until nothing is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    is over. Sequence p·G + g is sample g of prompt p, unless ``part`` has other numbers.
    """
    asked = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(num_samples)]
    part = part or Part(numbers=tuple(range(len(asked))))
    rollouts = {
        number: Rollout(prompt=prompt, turns=(), group=group)
        for number, (group, prompt) in zip(part.numbers, asked, strict=True)
    }
    running, turn = list(rollouts), part.turn
    while running:
        requests = [
            Request(number=n, prompt=(*rollouts[n].prompt.tokens, *rollouts[n].tokens))
            for n in running
        ]
        sampled, going = decode(requests, turn), []
        for n in running:
            rollouts[n] = replace(rollouts[n], turns=(*rollouts[n].turns, sampled[n]))
            answered = replied(rollouts[n], n, reply=reply, longest=longest)
            if answered is not None:
                rollouts[n] = answered
                going.append(n)
        running, turn = going, turn + 1
    done = list(rollouts.values())
    return [done[n : n + num_samples] for n in range(0, len(done), num_samples)]


def replied(
    rollout: Rollout, number: int, *, reply: Reply | None, longest: int | None
) -> Rollout | None:
    """The rollout with the reply to its last turn, for another one; None where it is over."""
    answer = None if reply is None else reply(rollout, number)
    if isinstance(answer, Future):
        answer = answer.result()
    if answer is None:
        return None
    if answer.sampled or not answer.tokens:
        raise ValueError(
            f"reply to prompt {rollout.prompt.id!r}: expected a turn of tokens without logprobs, "
            f"or None to end the rollout, got {answer!r}"
        )
    turns = (*rollout.turns, answer)
    length = len(rollout.prompt.tokens) + sum(len(each.tokens) for each in turns)
    return None if longest is not None and length > longest else replace(rollout, turns=turns)
