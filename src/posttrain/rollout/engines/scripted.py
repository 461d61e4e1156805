"""An engine for tests: it says what it is told to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from posttrain.rollout.engines.draws import completions
from posttrain.rollout.engines.requests import check_num_samples
from posttrain.rollout.engines.stops import Decode
from posttrain.types import Completion, Prompt, Sampling

Answer = str | Completion
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
    the same ``logprob``; a ``Completion`` is given back as it is, but for its version.

    >>> engine = ScriptedEngine(lambda prompt, sample: f"{prompt.text} {sample}", version=3)
    >>> prompts = [Prompt(id="a", text="x")]
    >>> ((completion,),) = engine.generate(prompts, Sampling(), num_samples=1, seed=0)
    >>> completion.text, completion.tokens, completion.stop_reason, completion.version
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
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[list[Completion]]:
        """``num_samples`` answers for each prompt, in order; the seed changes nothing."""
        check_num_samples(num_samples)
        return [
            [self._completion(self._answer(prompt, g), sampling) for g in range(num_samples)]
            for prompt in prompts
        ]

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

    def _completion(self, answer: Answer, sampling: Sampling) -> Completion:
        if isinstance(answer, Completion):
            return dataclasses.replace(answer, version=self.version)
        whole = (*self.encode(answer), self.end_token)
        tokens = whole[: sampling.max_new_tokens]
        (completion,) = completions(
            torch.tensor([tokens]),
            torch.full((1, len(tokens)), self.logprob, dtype=torch.float64),
            lengths=[len(tokens)],
            end_tokens=[self.end_token],
            decode=self.decode,
            version=self.version,
            stop=sampling.stop,
        )
        return completion
