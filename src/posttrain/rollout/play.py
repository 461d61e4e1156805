"""One episode that someone watches, or plays in: in the policy's place, or the environment's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.data.template import Template
from posttrain.protocols import Answer, Engine, Learner, Reply, Sync
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.tasks import PromptTask
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn

Ask = Callable[[str], str]
"""What a person writes, given the text that they answer; EOFError where nothing more comes."""
Show = Callable[[Rollout], None]
"""Called with an episode before its first turn, then after every turn: the last one is new."""
Place = Literal["policy", "env"]
UNSCORED = "the environment gave none, and a prompt that was typed has no rewards"
END = re.compile(r"\s*/end(?:\s+([-+]?[0-9.]*[0-9]))?\s*")  # the end, maybe with a score


@dataclass
class WatchedEngine:
    """An engine whose episodes are shown as they go on, turn by turn."""

    engine: Engine
    show: Show
    version: int = 0

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
        """As the engine does; every turn is shown when it is there."""
        for prompt in prompts:
            self.show(Rollout(prompt=prompt, turns=(), group=0))

        def watched(rollout: Rollout, number: int) -> Turn | None:
            self.show(rollout)
            answer = None if reply is None else reply(rollout, number)
            answer = answer.result() if isinstance(answer, Future) else answer
            if answer is not None:
                self.show(replace(rollout, turns=(*rollout.turns, answer)))
            return answer

        return self.engine.generate(
            prompts, sampling, num_samples=num_samples, seed=seed, reply=watched, part=part
        )

    def sync(self, learner: Learner) -> Sync:
        """That of the engine."""
        return self.engine.sync(learner)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def typed_engine(ask: Ask, template: Template, *, end_token: int) -> ScriptedEngine:
    """A person in the policy's place: what they type is encoded once, and ends with an end token.

    A special token that they spell is that token, as it is where a policy samples it. Their tokens
    have a log-prob of 0: nothing was drawn.
    """

    def write(prompt: Prompt, sample: int) -> Turn:
        text = ask(prompt.text)
        tokens = template.encode_completion(text, end_token, sampled=True)
        return Turn(tokens=tokens, text=text, logprobs=(0.0,) * len(tokens))

    return ScriptedEngine(write, decode=template.decode)


class TypedEnv:
    """A person in the environment's place: a line is a reply, ``/end`` or ``/end 0.5`` the end.

    For a model with a ``chat`` it is a user's message, else text as it stands.
    """

    def __init__(self, ask: Ask, *, chat: bool) -> None:
        self._ask, self._chat = ask, chat

    def start(self, prompt: Prompt) -> None:
        """A person remembers by themselves."""

    def reply(self, state: None, turn: Turn) -> Answer:
        """What is typed; nothing more to come ends the episode without a score."""
        text = ""
        while not text:  # an empty line says nothing
            try:
                text = self._ask(turn.text)
            except EOFError:
                return None
        if ended := END.fullmatch(text):
            return None if ended[1] is None else float(ended[1])
        return [{"role": "user", "content": text}] if self._chat else text


def one_prompt(*, text: str) -> PromptTask:
    """A task of a prompt that someone has typed; only an environment can score it.

    >>> one_prompt(text="2+3=").prompts("train")[0].text
    '2+3='
    """
    prompt = Prompt(id="prompt", text=text)
    return PromptTask(
        name="one_prompt",
        rewards={f"{__name__}:unscored": 1.0},
        train=(prompt,),
        test=(),
        solve=lambda prompt: "",
    )


def unscored(completion: str) -> float:
    """No score: there is nothing that a typed prompt could be scored by."""
    raise ValueError(UNSCORED)
