"""An engine for tests: it says what it is told to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from posttrain.models.stops import Decode
from posttrain.protocols import Learner, Reply
from posttrain.rollout.engines.conversation import converse
from posttrain.rollout.engines.draws import sampled_turns
from posttrain.rollout.engines.requests import Request, check_num_samples
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn

Answer = str | Turn
Script = Mapping[str, Sequence[Answer]] | Callable[[Prompt, int], Answer]


def code_points(text: str) -> list[int]:
    """A tokenizer that needs no vocabulary: the code point of each character.

    >>> code_points("hi")
    [104, 105]
    """
    return [ord(character) for character in text]


def characters(tokens: Sequence[int]) -> str:
    """The text of code points.

    >>> characters([104, 105])
    'hi'
    """
    return "".join(map(chr, tokens))


class ScriptedEngine:
    """Answers from a script: prompt text to answers (taken in turn), or a function of both.

    A text becomes tokens by ``encode`` and an ``end_token``, cut at ``max_new_tokens``, each with
    the same ``logprob``; a ``Turn`` is given back as it is, but for its version. The answer to a
    reply is that to the prompt with all that was said since.

    >>> engine = ScriptedEngine(lambda prompt, sample: f"{prompt.text} {sample}", version=3)
    >>> prompts = [Prompt(id="a", text="x")]
    >>> ((rollout,),) = engine.generate(prompts, Sampling(), num_samples=1, seed=0)
    >>> rollout.text, rollout.tokens, rollout.stop_reason, rollout.version
    ('x 0', (120, 32, 48, 0), 'stop', 3)
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] = code_points,
        decode: Decode = characters,
        end_token: int = 0,
        logprob: float = -1.0,
        version: int = 0,
    ) -> None:
        self.script = script
        self.encode = encode
        self.decode = decode
        self.end_token = end_token
        self.logprob = logprob
        self.version = version

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
        """``num_samples`` answers for each prompt, in order; the seed changes nothing."""
        check_num_samples(num_samples)

        def decode(requests: Sequence[Request], turn: int) -> dict[int, Turn]:
            return {request.number: self._turn(asked(request), sampling) for request in requests}

        numbers = part.numbers if part is not None else range(len(prompts) * num_samples)
        places = {number: place for place, number in enumerate(numbers)}

        def asked(request: Request) -> Answer:
            place = places[request.number]
            prompt = prompts[place // num_samples]
            said = self.decode(request.prompt[len(prompt.tokens) :])
            prompt = dataclasses.replace(prompt, text=prompt.text + said)
            return self._answer(prompt, place % num_samples)

        return converse(prompts, decode, num_samples=num_samples, reply=reply, part=part)

    def sync(self, learner: Learner) -> SharedWeights:
        """It has no weights: its answers only carry the new version."""
        return SharedWeights(self)

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, prompt: Prompt, sample: int) -> Answer:
        if callable(self.script):
            return self.script(prompt, sample)
        if not self.script.get(prompt.text):
            raise ValueError(
                f"prompt {prompt.id!r}: the script has no answer to {prompt.text!r}; "
                f"it has answers to {', '.join(map(repr, self.script))}"
            )
        answers = self.script[prompt.text]
        return answers[sample % len(answers)]

    def _turn(self, answer: Answer, sampling: Sampling) -> Turn:
        if isinstance(answer, Turn):
            return dataclasses.replace(answer, version=self.version)
        whole = (*self.encode(answer), self.end_token)
        tokens = whole[: sampling.max_new_tokens]
        (turn,) = sampled_turns(
            torch.tensor([tokens]),
            torch.full((1, len(tokens)), self.logprob, dtype=torch.float64),
            lengths=[len(tokens)],
            end_tokens=[self.end_token],
            decode=self.decode,
            version=self.version,
            stop=sampling.stop,
        )
        return turn
