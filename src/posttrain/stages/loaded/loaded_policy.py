"""A model that is loaded once, and then answers, scores texts and streams, as its run had it."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import torch

from posttrain.build.model_source import opened_source, over
from posttrain.build.sampler import make_engine
from posttrain.build.scoring import make_environment
from posttrain.build.setup import choose_device, make_policy, make_task_env, make_template
from posttrain.config import Recipe
from posttrain.models.cache import context_length
from posttrain.rollout.collect import collect
from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.stepwise import Stepwise
from posttrain.rollout.environment import talking
from posttrain.runs.finished import check_model
from posttrain.stages.eval import DEFAULT_TOKENS, tell_alone
from posttrain.stages.loaded.text_scores import (
    Scored,
    chat_row,
    completed_row,
    plain_tokens,
    score_rows,
    text_row,
)
from posttrain.track.progress import phase, showing
from posttrain.types import Part, Prompt, Rollout, Sampling

Chat = Sequence[Mapping[str, str]]
Asked = str | Chat | Prompt
"""A prompt: text, the messages of a chat, or a ``Prompt``."""
ToScore = str | Chat | Rollout | tuple[Asked, str]
"""A text, a chat whose assistant's turns are meant, a rollout, or a prompt and its completion."""
MAX_SAMPLES = 10_000  # of a prompt in a call, which keeps them all in memory


class LoadedPolicy:
    """A model in memory: ``generate``, ``stream`` and ``score`` until ``close``.

    ``model`` is "tiny", a model folder, a hub id, a GGUF file, or an object of transformers, copied
    with its ``tokenizer``; a run, a model folder inside one, or a recipe also brings its chat
    template, system message, stop strings, longest answer and environment. ``chat`` and ``stop``
    take their place. Several threads may ask one policy; each waits for its turn.

    >>> policy = Policy("runs/demo")                        # doctest: +SKIP
    >>> policy.generate(["2+3=", "4+4="])[0].text           # doctest: +SKIP
    '5'
    >>> policy.score(("2+3=", "5")).perplexity              # doctest: +SKIP
    1.02
    """

    @showing()
    def __init__(
        self,
        model: object,
        *,
        chat: bool | str | None = None,
        stop: Sequence[str] | None = None,
        device: str | None = None,
        overrides: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        with opened_source(model, tokenizer) as source:
            # Without a chat nobody hears a system message.
            changes = {"chat": chat, "system": "" if chat is False else None}
            more: dict[str, Any] = {} if device is None else {"run": {"device": device}}
            values = over(source.values, model=changes, **more, **stopping(stop))
            self.recipe = recipe = source.recipe(values, overrides)
            tell_alone(recipe)
            check_model(recipe.model.name)
            self.policy = make_policy(recipe, recipe.model.name, device=choose_device(recipe))
        self.policy.model.eval()
        self._env = make_task_env(recipe, self.policy, needed=False)
        self.template = make_template(recipe, self.policy, env=self._env)
        compute = recipe.model.compute
        engine = make_engine("native", self.policy, template=self.template, compute=compute)
        self.engine = cast(LocalEngine, engine)
        self._environment: Any = None
        self._lock = threading.RLock()
        self._closed = False

    @property
    def name(self) -> str:
        """The model folder, or the name that was given."""
        return self.recipe.model.name

    @property
    def model(self) -> torch.nn.Module:
        """The module of transformers."""
        return self.policy.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self.policy.tokenizer

    @property
    def pad_token(self) -> int:
        """What fills the rows of a batch; masks never come from it."""
        return self.policy.pad_token

    @showing()
    def generate(
        self,
        prompts: Asked | Sequence[Asked],
        *,
        num_samples: int = 1,
        seed: int = 0,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] | None = None,
    ) -> list[Rollout]:
        """``num_samples`` answers to each prompt, in order; greedy without a temperature.

        All are sampled together. What a prompt is answered is decided by its tokens and the seed,
        and not by the rest of the list, but for how sums are rounded; the same prompt twice is two
        samples of it. Where the run has an environment, it replies, and an
        answer has the score that it gave: there the place in the list counts too.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(
                f"num_samples: must be from 1 to {MAX_SAMPLES:,}, got {num_samples:,}; for more, "
                "call again with another seed"
            )
        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        asked = [self.prompt(each, number=n) for n, each in enumerate(_listed(prompts))]
        limits = [self._sampling(prompt, max_new_tokens, stop=stop, **drawing) for prompt in asked]
        total = num_samples * len(asked)
        with self._alone(), phase("sampling", total=total, unit="answers"):
            if self._env is not None:
                return self._talked(asked, limits, num_samples=num_samples, seed=seed)
            numbers = sequence_numbers(asked, num_samples)
            found: dict[int, list[Rollout]] = {}
            for sampling in dict.fromkeys(limits):
                some = [n for n, each in enumerate(limits) if each == sampling]
                part = Part(numbers=tuple(number for n in some for number in numbers[n]))
                answers = self.engine.generate(
                    [asked[n] for n in some],
                    sampling,
                    num_samples=num_samples,
                    seed=seed,
                    part=part,
                )
                found |= dict(zip(some, answers, strict=True))
        return [replace(r, group=n) for n in range(len(asked)) for r in found[n]]

    def stream(
        self,
        prompt: Asked,
        *,
        seed: int = 0,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] | None = None,
    ) -> Iterator[str]:
        """The text of an answer in pieces, as it is sampled: the answer that ``generate`` gives.

        A character of several tokens comes whole. An environment does not reply here.
        """
        drawing: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        steps = self.steps(prompt, seed=seed, max_new_tokens=max_new_tokens, stop=stop, **drawing)
        while not steps.done:
            with self._alone():
                (drawn,) = steps.step()
            if drawn.piece:
                yield drawn.piece

    def steps(
        self,
        prompt: Asked,
        *,
        num_samples: int = 1,
        seed: int = 0,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        top: int = 0,
        shown_temperature: float = 1.0,
        **drawing: Any,
    ) -> Stepwise:
        """Samples of a prompt a token at a time, each with the ``top`` likeliest beside it."""
        asked = self.prompt(prompt)
        sampling = self._sampling(asked, max_new_tokens, stop=stop, **drawing)
        with self._alone():
            return Stepwise(
                self.engine,
                asked,
                sampling=sampling,
                seed=seed,
                numbers=sequence_numbers([asked], num_samples)[0],
                top=top,
                temperature=shown_temperature,
            )

    @overload
    def score(
        self, given: str | Rollout | tuple[Asked, str], *, temperature: float = ..., end: bool = ...
    ) -> Scored: ...
    @overload
    def score(
        self,
        given: list[ToScore] | list[Rollout] | list[str] | list[tuple[str, str]],
        *,
        temperature: float = ...,
        end: bool = ...,
    ) -> list[Scored]: ...
    def score(
        self, given: Any, *, temperature: float = 1.0, end: bool = False
    ) -> Scored | list[Scored]:
        """How likely the model finds given texts, token by token; of a list a list.

        Of a text every token but the first, unless the model begins texts with a token of its own;
        of ``(prompt, completion)`` the completion, behind the prompt as ``generate`` writes it,
        with ``end=True`` also its end; of a chat, in a list, what the assistant wrote; of a rollout
        the very tokens that were sampled.
        """
        self._check_open()
        alone = isinstance(given, str | Rollout | tuple)
        items = cast(Sequence[ToScore], [given] if alone else given)
        rows = [self._row(item, end=end) for item in items]
        with self._alone():
            found = score_rows(rows, self.policy, engine=self.engine, temperature=temperature)
        return found[0] if alone else found

    def prompt(self, asked: Asked, *, number: int = 0) -> Prompt:
        """A prompt with the tokens that the model reads."""
        self._check_open()
        if isinstance(asked, Prompt):
            return asked if asked.tokens else replace(asked, tokens=self._rendered(asked).tokens)
        if isinstance(asked, str):
            plain = Prompt(id=f"prompt {number}", text=asked)
            return replace(plain, tokens=self._rendered(plain).tokens)
        return self._rendered(Prompt(id=f"prompt {number}", text="", messages=_messages(asked)))

    def plain_prompt(self, text: str) -> Prompt:
        """A text as it stands, without a chat, with its tokens."""
        self._check_open()
        return Prompt(id="text", text=text, tokens=plain_tokens(text, self.policy))

    def room(self, prompt: Prompt) -> int | None:
        """How many tokens the context leaves behind a prompt; None where it has no limit."""
        limit = context_length(self.policy.model)
        return None if limit is None else limit - len(prompt.tokens)

    @property
    def longest(self) -> int:
        """How many tokens an answer may have where nobody says so."""
        return longest_answer(self.recipe) or DEFAULT_TOKENS

    def close(self) -> None:
        """Give memory back, and end what runs beside this process."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        if self._environment is not None:
            self._environment.close()
        self.policy = replace(self.policy, model=torch.nn.Module())
        self.engine = cast(LocalEngine, None)

    def __enter__(self) -> LoadedPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Policy({self.name!r}{', closed' if self._closed else ''})"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self!r}: make another one to go on")

    def _alone(self) -> threading.RLock:
        self._check_open()
        return self._lock

    def _rendered(self, prompt: Prompt) -> Prompt:
        return self.template.render(prompt)

    def _sampling(
        self, prompt: Prompt, tokens: int | None, *, stop: Sequence[str] | None, **drawing: Any
    ) -> Sampling:
        room = self.room(prompt)
        if tokens is None:
            tokens = self.longest if room is None else min(self.longest, max(1, room))
        given = tuple(stop_strings(self.recipe) if stop is None else stop)
        if isinstance(stop, str):
            raise ValueError(f"stop: expected a list of texts, got {stop!r}")
        return Sampling(max_new_tokens=tokens, stop=given, **drawing)

    def _talked(
        self, asked: Sequence[Prompt], limits: Sequence[Sampling], *, num_samples: int, seed: int
    ) -> list[Rollout]:
        """Answers in the turns of the run's environment, with the scores that it gave."""
        if self._environment is None:
            section, known = self.recipe.environment, {"template": self.template}
            self._environment = make_environment(section, self._env, policy=self.policy, **known)
        talks = talking(self._environment)
        sampling = min(limits, key=lambda each: each.max_new_tokens)
        drawn: Any = {"sampling": sampling, "num_samples": num_samples, "seed": seed}
        answers = collect(self.engine, asked, reply=talks, **drawn)
        assert talks is not None
        broken = next((score.reason for score in talks.scores.values() if not score.ok), "")
        if broken:
            text = f"task.env: {broken}; a prompt given here has no columns of a row"
            warnings.warn(text, stacklevel=4)
        return [replace(answer, score=talks.scores.get(n)) for n, answer in enumerate(answers)]

    def _row(self, item: ToScore, *, end: bool) -> Any:
        if isinstance(item, Rollout):
            return (*item.prompt.tokens, *item.tokens), (
                *(False for _ in item.prompt.tokens),
                *item.mask,
            )
        if isinstance(item, str):
            return text_row(item, self.policy)
        if isinstance(item, tuple):
            prompt, completion = item
            return completed_row(self.prompt(prompt), completion, template=self.template, end=end)
        return chat_row(_messages(item), self.template)


def sequence_numbers(prompts: Sequence[Prompt], num_samples: int) -> list[list[int]]:
    """Numbers of the samples of each prompt, by which the seed decides their draws.

    They go by its tokens, not by its place: so the company of others changes nothing. A prompt that
    comes again has the next numbers.

    >>> one, two = Prompt(id="", text="", tokens=(1,)), Prompt(id="", text="", tokens=(2,))
    >>> alone, together = sequence_numbers([two], 2), sequence_numbers([one, two], 2)
    >>> together[1] == alone[0], sequence_numbers([two, two], 1) == [[n] for n in alone[0]]
    (True, True)
    """
    seen: Counter[int] = Counter()
    found = []
    for prompt in prompts:
        digest = hashlib.blake2b(repr(tuple(prompt.tokens)).encode(), digest_size=7).digest()
        first = int.from_bytes(digest, "big")
        found.append([first + seen[first] + n for n in range(num_samples)])
        seen[first] += num_samples
    return found


def _listed(prompts: Asked | Sequence[Asked]) -> list[Asked]:
    """The prompts of a list; one alone, a chat too, is a list of it."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(
            "prompts: expected a text, the messages of a chat, or a list of them that is not "
            f"empty, got {prompts!r}"
        )
    if all(isinstance(each, Mapping) for each in prompts):
        return [cast(Chat, prompts)]
    return list(cast(Sequence[Asked], prompts))


def _messages(chat: Any) -> tuple[Mapping[str, str], ...]:
    """The messages of a chat, or an error that says what one is."""
    usable = isinstance(chat, Sequence) and not isinstance(chat, str | bytes) and bool(chat)
    if not usable or not all(
        isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in chat
    ):
        shown = repr(chat)
        raise ValueError(
            'prompt: expected a text or messages, [{"role": "user", "content": "…"}], got '
            f"{shown if len(shown) < 80 else shown[:77] + '…'}"
        )
    return tuple(chat)


def longest_answer(recipe: Recipe) -> int | None:
    """How long an answer may be, where the recipe says so."""
    known = [section.max_new_tokens for section in (recipe.eval, recipe.rl) if section is not None]
    return next((number for number in known if number is not None), None)


def stop_strings(recipe: Recipe) -> tuple[str, ...]:
    """Strings that end an answer, as the recipe has them."""
    return tuple(recipe.rl.stop) if recipe.rl is not None else ()


def stopping(stop: Sequence[str] | None) -> dict[str, Any]:
    """Stop strings in their section, which a model alone does not have."""
    return {} if stop is None else {"rl": {"stop": stop}}
