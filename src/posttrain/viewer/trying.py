"""Samples of a run's model, token by token, with what else it might have said."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.build.model_source import find_source
from posttrain.build.setup import choose_device, make_policy, make_template
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.runs.finished import check_model
from posttrain.types import Prompt
from posttrain.viewer.shelf import ShownRun, UnknownError

MAX_PROMPT = 20_000  # characters
LIMITS = {"samples": (1, 8), "max_new_tokens": (1, 1024), "seed": (0, 2**31)}
NUM_ALTERNATIVES = 5
UNFINISHED = "\ufffd"  # how bytes that are no whole character are decoded


@dataclass
class Loaded:
    """A model that is ready to answer, and whose it is."""

    path: Path
    policy: Policy
    template: Any


class Answering:
    """Answers prompts by one model at a time: it stays loaded until another is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None

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
            if self._loaded is None or self._loaded.path != path:
                yield {"note": "loading the model"}
                self._loaded = None
                self._loaded = load(path)
            yield from sample(self._loaded, **given)
        except (ValueError, RuntimeError, OSError) as error:
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


def load(path: Path) -> Loaded:
    """The model of a folder inside a run, with the chat template that the run used."""
    source = find_source(str(path))
    recipe = source.recipe({"model": source.values["model"]})
    check_model(str(path))
    device = choose_device(recipe)
    policy = make_policy(recipe, recipe.model.name, device=device)
    policy.model.eval()
    return Loaded(path, policy, make_template(recipe, policy))


@torch.no_grad()
def sample(
    loaded: Loaded, *, prompt: str, samples: int, max_new_tokens: int, seed: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """Sample answers to a prompt, all samples a token at a time.

    Probabilities are those of the model at this temperature (of 1 where it is 0, greedy).
    """
    policy, template = loaded.policy, loaded.template
    model: Any = policy.model
    question = template.render(Prompt(id="typed", text=prompt))
    limit = context_length(model)
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(question.tokens))
    if room < 1:
        raise ValueError(f"prompt: its {len(question.tokens)} tokens leave the model no room")
    yield {"prompt": question.text, "samples": samples}
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.tensor([question.tokens] * samples, device=model.device)
    written: list[list[int]] = [[] for _ in range(samples)]
    said, past, ended = [""] * samples, None, [False] * samples
    for place in range(room):
        found = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = found.past_key_values
        probabilities = _probabilities(found.logits[:, -1], temperature)
        chosen = _drawn(probabilities, generator, greedy=temperature == 0)
        for number, token in enumerate(chosen.tolist()):
            if ended[number]:
                continue
            written[number].append(token)
            whole = template.decode(written[number])
            ended[number] = token in policy.end_tokens
            if whole.endswith(UNFINISHED) and not ended[number] and place < room - 1:
                whole = said[number]  # the tokens that follow may make it a character
            yield {
                "sample": number,
                "text": whole[len(said[number]) :],
                "end": ended[number],
                "probability": float(probabilities[number, token]),
                "top": _top(probabilities[number], template),
            }
            said[number] = whole
        if all(ended):
            break
        inputs = chosen[:, None].to(model.device)
    yield {"done": True, "cut": [not each for each in ended]}


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (logits.double().cpu() / (temperature or 1.0)).softmax(dim=-1)


def _drawn(probabilities: Tensor, generator: torch.Generator, *, greedy: bool) -> Tensor:
    if greedy:
        return probabilities.argmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _top(probabilities: Tensor, template: Any) -> list[dict[str, Any]]:
    values, tokens = probabilities.topk(min(NUM_ALTERNATIVES, len(probabilities)))
    return [
        {"text": _shown(template, token), "probability": value}
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
    ]


def _shown(template: Any, token: int) -> str:
    """A token alone; a special one by its name."""
    tokenizer = template.tokenizer
    return str(tokenizer.decode([token], skip_special_tokens=False))
