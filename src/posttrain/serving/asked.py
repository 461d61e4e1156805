"""What a client asks for: every parameter understood, or refused with the reason."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["chat", "completion"]

MAX_CHOICES = 16
MAX_TOP = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 200
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Parameters that change nothing at these values; at others they are refused, for this reason.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "the engine draws from the model's own distribution"),
    "presence_penalty": ((0,), "the engine draws from the model's own distribution"),
    "logit_bias": (({},), "the engine draws from the model's own distribution"),
    "tools": (([],), "calls are not parsed here; posttrain play runs environments with tools"),
    "tool_choice": (("none", "auto"), "there are no tools here"),
    "parallel_tool_calls": ((True, False), "there are no tools here"),
    "response_format": (({"type": "text"},), "answers are text, and nothing constrains them"),
    "modalities": ((["text"],), "answers are text"),
    "reasoning_effort": ((), "the model has no such setting"),
    "best_of": ((1,), "ask for n answers"),
    "echo": ((False,), "posttrain.Policy(...).score gives the log-probs of a prompt"),
    "suffix": (("",), "the model only continues texts"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one"),
}
UNUSED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # for the asker's own use
KNOWN = {
    "model", "messages", "prompt", "n", "temperature", "top_p", "top_k", "max_tokens",
    "max_completion_tokens", "stop", "seed", "logprobs", "top_logprobs", "stream", "stream_options",
}  # fmt: skip


class AskedWronglyError(ValueError):
    """A request that cannot be answered: why, which parameter, and the status to say so with."""

    def __init__(
        self, text: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(text)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request with nothing missing; ``drawing`` are options of ``Policy.steps``."""

    kind: Kind
    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    n: int = 1
    max_new_tokens: int | None = None
    seed: int = 0
    stop: tuple[str, ...] | None = None
    top: int = 0
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    drawing: Mapping[str, Any] = field(default_factory=dict)


def read_asked(body: Any, *, kind: Kind, model: str) -> CompletionRequest:
    """A request as it came, checked."""
    if not isinstance(body, Mapping):
        raise AskedWronglyError("the request is not a JSON object")
    given = {str(name): value for name, value in body.items() if value is not None}
    _check_names(given, kind)
    if given.get("model", model) != model:
        text = f"the model {given['model']!r} is not here; there is {model!r} alone"
        raise AskedWronglyError(text, param="model", code="model_not_found", status=404)
    stream = _flag(given, "stream")
    temperature = _number(given, "temperature", default=1.0, low=0.0, high=10.0)
    top_p = _number(given, "top_p", default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise AskedWronglyError("top_p: must be above 0 and at most 1", param="top_p")
    return CompletionRequest(
        kind=kind,
        prompt=_chat(given) if kind == "chat" else _text(given),
        n=_whole(given, "n", default=1, low=1, high=MAX_CHOICES),
        max_new_tokens=_limit(given),
        seed=_whole(given, "seed", default=secrets.randbits(48), low=-(2**63), high=2**63 - 1),
        stop=_stop(given),
        stream=stream,
        usage=_usage(given, stream),
        drawing={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": _whole(given, "top_k", default=0, low=0, high=2**31),
        },
        **_logprobs(given, kind),
    )


def _check_names(given: Mapping[str, Any], kind: Kind) -> None:
    for name, value in given.items():
        if name in NEUTRAL:
            allowed, why = NEUTRAL[name]
            if value not in allowed:
                raise AskedWronglyError(f"{name}: is not supported, because {why}", param=name)
        elif name not in KNOWN | UNUSED:
            raise AskedWronglyError(f"{name}: is not a parameter that is known here", param=name)
    other = "prompt" if kind == "chat" else "messages"
    if other in given:
        raise AskedWronglyError(f"{other}: is for the other endpoint", param=other)


def _logprobs(given: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Whether log-probs are asked for, and with how many alternatives: each API in its own way."""
    if kind == "completion":
        if "top_logprobs" in given:
            raise AskedWronglyError(
                "top_logprobs: give their number as logprobs", param="top_logprobs"
            )
        asked = "logprobs" in given
        top = _whole(given, "logprobs", default=0, low=0, high=MAX_TOP)
        return {"logprobs": asked, "top": top}
    asked = _flag(given, "logprobs")
    top = _whole(given, "top_logprobs", default=0, low=0, high=MAX_TOP)
    if top and not asked:
        raise AskedWronglyError("top_logprobs: needs logprobs=true", param="top_logprobs")
    return {"logprobs": asked, "top": top}


def _usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    known = isinstance(options, Mapping) and not options.keys() - {"include_usage"}
    if not known or (options and not stream):
        raise AskedWronglyError(
            'stream_options: {"include_usage": true} of a stream is all there is',
            param="stream_options",
        )
    return bool(options.get("include_usage"))


def _limit(given: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    values = {_whole(given, name, default=1, low=1, high=2**31) for name in names}
    if len(values) > 1:
        raise AskedWronglyError(
            "max_tokens: max_completion_tokens says otherwise; give one of them", param="max_tokens"
        )
    return values.pop() if values else None


def _stop(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The run's own where none is given."""
    stop = given.get("stop")
    if stop is None:
        return None
    strings = [stop] if isinstance(stop, str) else stop
    fitting = isinstance(strings, list) and len(strings) <= MAX_STOPS
    if not fitting or not all(
        isinstance(each, str) and 0 < len(each) <= MAX_STOP_LENGTH for each in strings
    ):
        raise AskedWronglyError(
            f"stop: expected a text, or at most {MAX_STOPS} of them, none empty or longer than "
            f"{MAX_STOP_LENGTH} characters",
            param="stop",
        )
    return tuple(strings)


def _text(given: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt: Any = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    whole = isinstance(prompt, list) and bool(prompt)
    if whole and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
        return tuple(prompt)
    raise AskedWronglyError(
        "prompt: expected one text, or the tokens of one; for several prompts send several "
        "requests",
        param="prompt",
    )


def _chat(given: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AskedWronglyError("messages: expected a list that is not empty", param="messages")
    return tuple(_message(each, number) for number, each in enumerate(messages))


def _message(message: Any, number: int) -> Mapping[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise AskedWronglyError(f"{where}: expected an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise AskedWronglyError(f"{where}.role: is {role!r}; known here: {known}", param="messages")
    more = [name for name, value in message.items() if value and name not in ("role", "content")]
    if more:
        raise AskedWronglyError(f"{where}.{more[0]}: is not supported", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise AskedWronglyError(
                f"{where}.content: only parts of text are read", param="messages"
            )
        content = "".join(str(text) for text in texts)
    if not isinstance(content, str):
        raise AskedWronglyError(f"{where}.content: expected a text", param="messages")
    return {"role": ROLES[role], "content": content}


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise AskedWronglyError(f"{name}: expected true or false, got {value!r}", param=name)
    return value


def _whole(given: Mapping[str, Any], name: str, *, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        text = f"{name}: expected a whole number from {low} to {high}, got {value!r}"
        raise AskedWronglyError(text, param=name)
    return value


def _number(
    given: Mapping[str, Any], name: str, *, default: float, low: float, high: float
) -> float:
    value = given.get(name, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # NaN is not
        text = f"{name}: expected a number from {low:g} to {high:g}, got {value!r}"
        raise AskedWronglyError(text, param=name)
    return float(value)
