"""The engine of our own: every distinct prompt is read once, and no one waits for the longest.

Where the model allows it, sequences run in slots (:mod:`posttrain.fast.decode`). The plain twin
decodes part after part over a growing KV cache: ``prefill`` reads the prompts, ``Running`` is the
cache of the sequences that have not ended, ``Draws`` has the randomness and the tokens of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.decode import Decoder, Drawn
from posttrain.models.adapter_group import choice_of, owners
from posttrain.models.cache import new_cache, next_logits, select_rows
from posttrain.protocols import Reply
from posttrain.rollout.engines.conversation import Replies, begun, by_prompt
from posttrain.rollout.engines.draws import Draws, sampled_turns
from posttrain.rollout.engines.local import LocalEngine, samples_alone
from posttrain.rollout.engines.requests import Request, left_pad
from posttrain.track.progress import advance
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn
from posttrain.types.ways import Support, Way

CHECK_EVERY = 4  # steps between two looks at who has ended (a look makes a GPU's queue run dry)
SHRINK_AT = 0.75  # ended sequences are dropped once only this share of the rows is still running
POLL = 0.2  # seconds between two chances to break off
WITHOUT_SLOTS = {
    "cuda": "each step is launched kernel by kernel, uncompiled, and batches wait for each other",
    "cpu": "batches wait for each other (measured on a CPU: about as fast)",
}


class NativeEngine(LocalEngine):
    """Decodes with keys and values at hand, for every decoder whose memory is those alone.

    ``slots`` may be turned off, to go the way of models whose attention is not ours to replace.
    ``compiled`` has the layers compiled before they are captured: quicker steps, a longer start.
    In ``rounds`` all sequences have their turn before one has another, and all is read again: the
    fast way of a model so small that a pass costs the same for one sequence as for many (None).
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: bool = True,
        compiled: bool = False,
        rounds: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._slots = slots
        self._rounds = samples_alone(model) if rounds is None else rounds
        self._decoder = Decoder(
            model,
            end_tokens=self.end_tokens,
            compute=self.compute,
            compiled=compiled,
            max_sequences=self.max_sequences,
        )

    def check_model(self) -> None:
        """Raise if the model remembers something else."""
        new_cache(self.model)

    def close(self) -> None:
        """Give back the memory of the slots, and of the copy in half precision."""
        self._decoder.close()

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
        """``num_samples`` rollouts of each prompt, in order; the seed decides every token.

        In slots, a sequence goes on when its own reply has come, and others sample meanwhile;
        unless in rounds.
        """
        slots = self._slots and not self._rounds
        if reply is None or not (slots and prompts and self._decoder.takes_model()):
            return super().generate(
                prompts, sampling, num_samples=num_samples, seed=seed, reply=reply, part=part
            )
        longest = self.check(prompts, sampling, num_samples=num_samples)
        rollouts = begun(prompts, num_samples=num_samples, part=part)
        outside = partial(_outside, self.model.device.type, torch.is_grad_enabled())

        def asked(rollout: Rollout, number: int) -> Any:
            with outside():
                return reply(rollout, number)

        try:
            with self.evaluating(), self.precision(keep_casts=False):
                first, replies = part.turn if part else 0, Replies(asked, longest=longest)
                self._converse(rollouts, sampling, seed=seed, first=first, replies=replies)
        except BaseException:
            self._decoder.forget()  # what it remembers may be no number
            raise
        return by_prompt(rollouts, num_samples)

    def _converse(
        self,
        rollouts: dict[int, Rollout],
        sampling: Sampling,
        *,
        seed: int,
        first: int,
        replies: Replies,
    ) -> None:
        """Sample the turns of all rollouts in slots, each as soon as its reply is there."""

        def randomness(numbers: Sequence[int], turns: Sequence[int]) -> Tensor:
            steps = sampling.max_new_tokens
            drawn = [
                self.uniforms(seed, sequences=[number], num_steps=steps, turn=first + turn)
                for number, turn in zip(numbers, turns, strict=True)
            ]
            return torch.cat(drawn)

        prompts = {number: self.read_by(number, r.prompt.tokens) for number, r in rollouts.items()}
        slots = self._decoder.turns(prompts, sampling, randomness=randomness, decode=self.decode)
        left = len(rollouts)

        def go_on(answered: Mapping[int, Rollout | None]) -> int:
            for number, rollout in answered.items():
                if rollout is None:
                    slots.end(number)
                    continue
                rollouts[number] = rollout
                # The token that was drawn last has not been read either.
                unread = 1 + len(rollout.turns[-1].tokens)
                slots.go_on(number, rollout.tokens, unread=unread)
            over = list(answered.values()).count(None)
            advance(over)
            return over

        while left:
            drawn = None if slots.idle else slots.step()
            if drawn is not None:
                turns = self._sampled(drawn, sampling)
                for number, turn in zip(drawn.numbers, turns, strict=True):
                    whole = (*rollouts[number].turns, turn)
                    rollouts[number] = replace(rollouts[number], turns=whole)
                    replies.ask(rollouts[number], number)
            left -= go_on(replies.at_once())
            slots.make_room()
            if slots.idle and left:
                wait(replies.later, timeout=POLL, return_when=FIRST_COMPLETED)
            left -= go_on(replies.come())
            slots.make_room()

    def _sampled(self, drawn: Drawn, sampling: Sampling) -> list[Turn]:
        return sampled_turns(
            drawn.tokens,
            drawn.logprobs,
            lengths=drawn.lengths,
            end_tokens=self.end_tokens,
            decode=self.decode,
            version=self.version,
            stop=sampling.stop,
        )

    def decode_all(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, turn: int
    ) -> dict[int, Turn]:
        """Through slots where they are wanted and the model allows it, else in parts."""
        if not (self._slots and requests and self._decoder.takes_model()):
            return super().decode_all(requests, sampling, seed=seed, turn=turn)
        try:
            return self._decode_in_slots(requests, sampling, seed=seed, turn=turn)
        except BaseException:
            self._decoder.forget()  # what it remembers may be no number
            raise

    def _decode_in_slots(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, turn: int
    ) -> dict[int, Turn]:
        """The next turn of each request, by its number."""
        prompts = {r.number: self.read_by(r.number, r.prompt) for r in requests}
        found: dict[int, Turn] = {}

        def randomness(numbers: Sequence[int]) -> Tensor:
            steps = sampling.max_new_tokens
            return self.uniforms(seed, sequences=numbers, num_steps=steps, turn=turn)

        with self.precision(keep_casts=False):
            for drawn in self._decoder.decode(
                prompts, sampling, randomness=randomness, decode=self.decode
            ):
                found.update(zip(drawn.numbers, self._sampled(drawn, sampling), strict=True))
                advance(len(drawn.numbers))
        return found

    def way(self) -> Way:
        """Continuous batching where the model allows them."""
        verdict = self._decoder.takes_model() if self._slots else Support("they are turned off")
        if verdict:
            return self._decoder.way()
        cost = WITHOUT_SLOTS["cuda" if self.model.device.type == "cuda" else "cpu"]
        return Way.of(
            "batches with a growing cache", wanted=[("continuous batching", verdict, cost)]
        )

    def decode_part(self, prompts: Sequence[tuple[int, ...]], draws: Draws) -> None:
        """Draw until each sequence has ended or is full; equal prompts are read once."""
        distinct = list(dict.fromkeys(prompts))
        running, logits = prefill(self.model, distinct, num_steps=draws.sampling.max_new_tokens)
        if len(distinct) < len(prompts):
            index = {prompt: row for row, prompt in enumerate(distinct)}
            shared = torch.tensor([index[prompt] for prompt in prompts], device=logits.device)
            running.select(shared)
            logits = logits[shared]
        rows = torch.arange(len(prompts), device=logits.device)  # whose turn it is
        while True:
            tokens = draws.draw(logits, rows)
            if draws.full:
                return
            if draws.step % CHECK_EVERY == 0:
                draws.end_stopped(self.decode, new=CHECK_EVERY)
                left = (~draws.ended[rows]).nonzero()[:, 0]
                if not len(left):
                    return
                if len(left) <= SHRINK_AT * len(rows):
                    running.select(left)
                    rows, tokens = rows[left], tokens[left]
            logits = running.step(tokens)


@contextmanager
def _outside(device: str, gradient: bool) -> Iterator[None]:
    """Inside, the code of a user computes as it would outside of the engine."""
    with torch.set_grad_enabled(gradient), torch.autocast(device, enabled=False):
        yield


class Running:
    """What the model remembers of the sequences that have not ended, one row each.

    ``positions`` [n] is where a row's next token stands in its own sequence, ``width`` how many
    columns the padded batch has. ``attention`` [n, prompt + new] leaves out the padding; it is
    None where there is none, which spares the model a mask. ``adapters`` [n] are those that rows
    have, of a model with several.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: Any,
        positions: Tensor,
        attention: Tensor | None,
        adapters: Tensor,
    ) -> None:
        self.model = model
        self.choice, self.adapters = choice_of(model), adapters
        self.cache = cache
        self.positions = positions
        self.attention = attention
        self.width = int(cache.get_seq_length())

    def step(self, tokens: Tensor) -> Tensor:
        """Read the next token of each row; the logits of the one after it: [n] → [n, V]."""
        self.width += 1
        if self.choice is not None:
            self.choice.choose(self.adapters)
        logits = next_logits(
            self.model,
            tokens[:, None],
            cache=self.cache,
            positions=self.positions[:, None],
            attention=None if self.attention is None else self.attention[:, : self.width],
        )
        self.positions = self.positions + 1
        return logits

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        select_rows(self.cache, rows)
        self.positions = self.positions[rows]
        if self.choice is not None:
            self.adapters = self.adapters[rows]
        if self.attention is not None:
            self.attention = self.attention[rows]


def prefill(
    model: Any, prompts: Sequence[Sequence[int]], *, num_steps: int
) -> tuple[Running, Tensor]:
    """Read prompts: their rows, with attention for ``num_steps`` more tokens, and logits [P, V]."""
    tokens, attention = left_pad(prompts, device=model.device)
    ragged = len({len(prompt) for prompt in prompts}) > 1
    cache, choice = new_cache(model), choice_of(model)
    adapters = owners(prompts, device=model.device)
    if choice is not None:
        choice.choose(adapters, tokens.shape[1])
    logits = next_logits(
        model,
        tokens,
        cache=cache,
        positions=(attention.cumsum(1) - 1).clamp_min(0),
        attention=attention if ragged else None,
    )
    whole = torch.nn.functional.pad(attention, (0, num_steps), value=True) if ragged else None
    running = Running(
        model, cache=cache, positions=attention.sum(1), attention=whole, adapters=adapters
    )
    return running, logits
