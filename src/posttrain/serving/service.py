"""One thread that samples for all requests: a token of each at a time, so that none waits for all.

Each request has passes of its own, in which its ``n`` samples run together: so what it is answered
cannot depend, not even by a rounding, on who else asks. At most ``active`` requests are sampled at
once and ``waiting`` more queue; beyond that the service says that it is busy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from posttrain.rollout.engines.stepwise import SampledToken, Stepwise
from posttrain.serving.asked import AskedWronglyError, CompletionRequest
from posttrain.stages.loaded.loaded_policy import LoadedPolicy
from posttrain.types import Prompt

IDLE = 0.5  # seconds between two looks whether the service is to end
Tell = Callable[["Event"], None]


class BusyError(RuntimeError):
    """All places are taken, and as many as may are waiting."""


class Event:
    """What happened to a request: ``tokens`` of one step, an ``error``, or the end."""

    def __init__(
        self,
        *,
        prompt_tokens: int = 0,
        tokens: list[SampledToken] | None = None,
        error: Exception | None = None,
        done: bool = False,
    ) -> None:
        self.prompt_tokens, self.tokens = prompt_tokens, tokens or []
        self.error, self.done = error, done


class ServedRequest:
    """One request on its way; ``tell`` is called with its events, in the service's thread."""

    def __init__(self, asked: CompletionRequest, tell: Tell) -> None:
        self.asked, self.tell = asked, tell
        self.cancelled = threading.Event()
        self.steps: Stepwise | None = None


class Service:
    """Samples with one policy until it is closed."""

    def __init__(
        self,
        policy: LoadedPolicy,
        *,
        active: int = 4,
        waiting: int = 32,
        max_tokens: int | None = None,
    ) -> None:
        self.policy = policy
        self.num_running = 0
        """Requests that are being sampled."""
        self._active, self._max_tokens = active, max_tokens
        self._waiting: queue.Queue[ServedRequest] = queue.Queue(waiting)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posttrain-serve", daemon=True)
        self._thread.start()

    def submit(self, asked: CompletionRequest, tell: Tell) -> ServedRequest:
        """Queue a request; who no longer wants the answer sets ``ServedRequest.cancelled``."""
        job = ServedRequest(asked, tell)
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            raise BusyError("as many requests as may wait do so; ask again later") from None
        return job

    def close(self) -> None:
        """End the thread; requests that are not answered hear so."""
        self._ending.set()
        self._thread.join()
        self.policy.close()

    def _run(self) -> None:
        running: list[ServedRequest] = []
        while not self._ending.is_set():
            while len(running) < self._active and (job := self._next(wait=not running)):
                running.append(job)
            running = [job for job in running if self._advanced(job)]
            self.num_running = len(running)
        error = RuntimeError("the server is ending")
        while not self._waiting.empty():
            running.append(self._waiting.get_nowait())
        for job in running:
            job.tell(Event(error=error))

    def _next(self, *, wait: bool) -> ServedRequest | None:
        try:
            return self._waiting.get(timeout=IDLE) if wait else self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _advanced(self, job: ServedRequest) -> bool:
        """Sample one token of each choice of a request; whether it goes on."""
        if job.cancelled.is_set():
            return False
        try:
            if job.steps is None:
                job.steps = self._begin(job.asked)
                job.tell(Event(prompt_tokens=len(job.steps.prompt.tokens)))
            job.tell(Event(tokens=job.steps.step()))
        except Exception as error:  # noqa: BLE001 - of whatever kind: the others are to be answered
            # What the template, the tokenizer or the model cannot do is this request's alone.
            job.tell(Event(error=error))
            return False
        if job.steps.done:
            job.tell(Event(done=True))
            return False
        return True

    def _begin(self, asked: CompletionRequest) -> Stepwise:
        prompt = self._prompt(asked)
        limits = [self.policy.room(prompt), self._max_tokens]
        most = min((limit for limit in limits if limit is not None), default=None)
        wanted = asked.max_new_tokens
        if most is not None and most < 1:
            raise AskedWronglyError(
                f"the prompt has {len(prompt.tokens)} tokens, and leaves no room for an answer",
                code="context_length_exceeded",
            )
        if most is not None and wanted is not None and wanted > most:
            raise AskedWronglyError(
                f"max_tokens: {wanted} requested, but at most {most} fit after the prompt (prompt "
                f"tokens: {len(prompt.tokens)})",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if wanted is None and most is not None:
            wanted = min(most, self.policy.longest)
        return self.policy.steps(
            prompt,
            num_samples=asked.n,
            seed=asked.seed,
            max_new_tokens=wanted,
            stop=asked.stop,
            top=asked.top,
            **asked.drawing,
        )

    def _prompt(self, asked: CompletionRequest) -> Prompt:
        given: Any = asked.prompt
        if asked.kind == "chat":
            if not self.policy.template.chat:
                raise AskedWronglyError(
                    "messages: this model is asked without a chat template; use /v1/completions",
                    param="messages",
                )
            return self.policy.prompt(given)
        if isinstance(given, str):
            return self.policy.plain_prompt(given)
        size = len(self.policy.tokenizer)
        if not all(0 <= token < size for token in given):
            raise AskedWronglyError(f"prompt: tokens are from 0 to {size - 1} here", param="prompt")
        return Prompt(id="prompt", text="", tokens=given)
