"""Turn after turn: what an engine samples, what is replied, until nothing is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from posttrain.protocols import Reply
from posttrain.rollout.engines.requests import Request
from posttrain.types import Prompt, Rollout, Turn

Decode = Callable[[Sequence[Request], int], dict[int, Turn]]


def converse(
    prompts: Sequence[Prompt],
    decode: Decode,
    *,
    num_samples: int,
    reply: Reply | None,
    longest: int | None = None,
) -> list[list[Rollout]]:
    """``num_samples`` rollouts of each prompt: ``decode(requests, turn)`` gives their next turns.

    All have had their turn before the first has another. A rollout of more than ``longest`` tokens
    is over. Sequence p·G + g is sample g of prompt p.
    """
    rollouts = [
        Rollout(prompt=prompt, turns=(), group=group)
        for group, prompt in enumerate(prompts)
        for _ in range(num_samples)
    ]
    running, turn = list(range(len(rollouts))), 0
    while running:
        requests = [
            Request(number=n, prompt=(*rollouts[n].prompt.tokens, *rollouts[n].tokens))
            for n in running
        ]
        sampled = decode(requests, turn)
        for number in running:
            turns = (*rollouts[number].turns, sampled[number])
            rollouts[number] = replace(rollouts[number], turns=turns)
        running, turn = (
            [n for n in running if _replied(rollouts, n, reply=reply, longest=longest)],
            turn + 1,
        )
    return [rollouts[n : n + num_samples] for n in range(0, len(rollouts), num_samples)]


def _replied(
    rollouts: list[Rollout], number: int, *, reply: Reply | None, longest: int | None
) -> bool:
    """Ask for a reply, and whether the policy has another turn."""
    rollout = rollouts[number]
    answer = None if reply is None else reply(rollout, number)
    if answer is None:
        return False
    if answer.sampled or not answer.tokens:
        raise ValueError(
            f"reply to prompt {rollout.prompt.id!r}: expected a turn of tokens without logprobs, "
            f"or None to end the rollout, got {answer!r}"
        )
    turns = (*rollout.turns, answer)
    length = len(rollout.prompt.tokens) + sum(len(each.tokens) for each in turns)
    if longest is not None and length > longest:
        return False
    rollouts[number] = replace(rollout, turns=turns)
    return True
