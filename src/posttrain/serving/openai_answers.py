"""Answers in the shapes of OpenAI: whole ones, chunks of a stream, and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.rollout.engines.stepwise import SampledToken
from posttrain.rollout.engines.text_pieces import UNFINISHED
from posttrain.serving.asked import CompletionRequest

REASONS = {"stop": "stop", "stop_string": "stop", "length": "length"}


def error_body(
    text: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """An error as clients expect it."""
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


class AnswerWriter:
    """Writes the answer to one request, at once or chunk by chunk, and counts its tokens.

    Log-probs are the model's own, at temperature 1, whatever was drawn with. The end token is
    counted, and not among them.
    """

    def __init__(
        self, asked: CompletionRequest, *, model: str, tokenizer: Any, end: Sequence[int]
    ) -> None:
        self.prompt_tokens = self.completion_tokens = 0
        self._asked, self._tokenizer, self._end = asked, tokenizer, frozenset(end)
        chat = asked.kind == "chat"
        self._begun = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._name = "chat.completion" if chat else "text_completion"
        self._texts = [""] * asked.n
        self._reasons: list[str | None] = [None] * asked.n
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(asked.n)]
        self._offsets = [0] * asked.n

    def add(self, tokens: Iterable[SampledToken]) -> list[dict[str, Any]]:
        """Take the tokens of a step; the chunks of a stream that say so."""
        chunks = []
        for drawn in tokens:
            self.completion_tokens += 1
            number = drawn.sample
            self._texts[number] += drawn.piece
            entries = []
            if self._asked.logprobs and drawn.token not in self._end:
                entries = [self._entry(drawn)]
                self._entries[number] += entries
            if drawn.stop_reason is not None:
                self._reasons[number] = REASONS[drawn.stop_reason]
            if drawn.piece or entries:
                chunks.append(self._chunk(number, drawn.piece, entries=entries))
            if drawn.stop_reason is not None:
                chunks.append(self._chunk(number, "", reason=self._reasons[number]))
        return chunks

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream: who speaks, of a chat."""
        if self._asked.kind == "completion":
            return []
        opened = []
        for number in range(self._asked.n):
            chunk = self._chunk(number, "")
            chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            opened.append(chunk)
        return opened

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk of a stream: what it took, where that was asked for."""
        usage = {**self._head(chunk=True), "choices": [], "usage": self.usage()}
        return [usage] if self._asked.usage else []

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        choices = [self._choice(number) for number in range(self._asked.n)]
        return {**self._head(), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """The tokens that it took."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _head(self, *, chunk: bool = False) -> dict[str, Any]:
        streamed = chunk and self._asked.kind == "chat"
        return {**self._begun, "object": f"{self._name}.chunk" if streamed else self._name}

    def _choice(self, number: int) -> dict[str, Any]:
        text, reason = self._texts[number], self._reasons[number]
        logprobs = self._logprobs(self._entries[number], start=0)
        choice = {"index": number, "finish_reason": reason, "logprobs": logprobs}
        if self._asked.kind == "completion":
            return {**choice, "text": text}
        return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk(
        self,
        number: int,
        piece: str,
        *,
        reason: str | None = None,
        entries: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "logprobs": None}
        if entries:
            choice["logprobs"] = self._logprobs(entries, start=self._offsets[number])
            self._offsets[number] += sum(len(entry["token"]) for entry in entries)
        if self._asked.kind == "completion":
            choice["text"] = piece
        else:
            choice["delta"] = {"content": piece} if piece or entries else {}
        return {**self._head(chunk=True), "choices": [choice]}

    def _logprobs(
        self, entries: Sequence[Mapping[str, Any]], *, start: int
    ) -> dict[str, Any] | None:
        """Log-probs of tokens, each API in its own way."""
        if not self._asked.logprobs:
            return None
        if self._asked.kind == "chat":
            return {"content": list(entries), "refusal": None}
        offsets = [start]
        for entry in entries:
            offsets.append(offsets[-1] + len(entry["token"]))
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "text_offset": offsets[:-1],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
                for entry in entries
            ],
        }

    def _entry(self, drawn: SampledToken) -> dict[str, Any]:
        others = [self._named(token, logprob) for token, logprob in drawn.top]
        return {**self._named(drawn.token, drawn.shown), "top_logprobs": others}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        whole = UNFINISHED not in text  # of a part of a character the bytes are not known
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),  # JSON has no infinity
            "bytes": list(text.encode()) if whole else None,
        }
