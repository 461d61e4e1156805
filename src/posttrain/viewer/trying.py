"""Samples of a run's model, token by token, with what else it might have said."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.stages.loaded.loaded_policy import LoadedPolicy
from posttrain.viewer.shelf import ShownRun, Stamp, UnknownError, file_stamps

MAX_PROMPT = 20_000  # characters
LIMITS = {"samples": (1, 8), "max_new_tokens": (1, 1024), "seed": (0, 2**31)}
NUM_ALTERNATIVES = 5


class Answering:
    """Answers prompts by one model at a time: it stays loaded until another is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: tuple[tuple[Path, Stamp], LoadedPolicy] | None = None

    def answer(self, run: ShownRun, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What is sampled, an event a token: ``{"sample", "text", "probability", "top"}``."""
        given = checked(asked)
        models = run.models()
        if not models:
            raise UnknownError(f"{run.name}: has no trained model yet")
        name = str(asked.get("model") or list(models)[-1])
        if name not in models:
            raise UnknownError(f"{run.name}: has no model of this name")
        return self._sampled(models[name], given)

    def _sampled(self, path: Path, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._lock.acquire(blocking=False):
            yield {"error": "another prompt is being answered; ask again when it is done"}
            return
        try:
            known = path, tuple(file_stamps(sorted(path.iterdir()), path))  # it may learn on
            if self._loaded is None or self._loaded[0] != known:
                yield {"note": "loading the model"}
                self._loaded = None
                self._loaded = known, LoadedPolicy(str(path))
            yield from sample(self._loaded[1], **given)
        except Exception as error:  # noqa: BLE001 - whatever template, tokenizer or model cannot do
            yield {"error": str(error)}
        finally:
            self._lock.release()


def checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The question with every number inside its limits."""
    prompt = asked.get("prompt")
    if not isinstance(prompt, str) or not prompt or len(prompt) > MAX_PROMPT:
        raise ValueError(f"prompt: expected a text of 1 to {MAX_PROMPT:,} characters")
    given: dict[str, Any] = {"prompt": prompt}
    defaults = {"samples": 4, "max_new_tokens": 64, "seed": 0}
    for name, (low, high) in LIMITS.items():
        value = asked.get(name, defaults[name])
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
        given[name] = value
    warmth = asked.get("temperature", 1.0)
    if not isinstance(warmth, int | float) or isinstance(warmth, bool) or not 0 <= warmth <= 10:
        raise ValueError(f"temperature: expected 0 (greedy) to 10, got {warmth!r}")
    return {**given, "temperature": float(warmth)}


def sample(
    policy: LoadedPolicy,
    *,
    prompt: str,
    samples: int,
    max_new_tokens: int,
    seed: int,
    temperature: float,
) -> Iterator[dict[str, Any]]:
    """Sample answers to a prompt, all samples a token at a time.

    Probabilities are those of the model at this temperature (of 1 where it is 0, greedy).
    """
    question = policy.prompt(prompt)
    room = policy.room(question)
    most = max_new_tokens if room is None else min(max_new_tokens, room)
    if most < 1:
        raise ValueError(f"prompt: its {len(question.tokens)} tokens leave the model no room")
    yield {"prompt": policy.tokenizer.decode(question.tokens), "samples": samples}
    steps = policy.steps(
        question,
        num_samples=samples,
        seed=seed,
        max_new_tokens=most,
        stop=(),
        top=NUM_ALTERNATIVES,
        shown_temperature=temperature or 1.0,
        temperature=temperature,
    )
    while not steps.done:
        for drawn in steps.step():
            yield {
                "sample": drawn.sample,
                "text": drawn.piece,
                "end": drawn.stop_reason == "stop",
                "probability": math.exp(drawn.shown),
                "top": [_named(policy, token, logprob=chance) for token, chance in drawn.top],
            }
    yield {"done": True, "cut": [each.stop_reason == "length" for each in steps.rollouts()]}


def _named(policy: LoadedPolicy, token: int, *, logprob: float) -> dict[str, Any]:
    """A token alone; a special one by its name."""
    text = str(policy.tokenizer.decode([token], skip_special_tokens=False))
    return {"text": text, "probability": math.exp(logprob)}
