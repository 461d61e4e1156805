"""vLLM in this process, asked by posttrain's own engine for it: no server is needed, and no HTTP.

``InProcess`` stands in for a server. The threads of :class:`VllmEngine` ask it as they would ask
one over HTTP; a single thread owns vLLM, adds what is asked between two of its steps, and answers
what has ended. Set ``VLLM_ENABLE_V1_MULTIPROCESSING=0``: vLLM runs here, not in a child.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from samplers import Job, Setup, free, timed
from torch import Tensor

from posttrain.models.load import Policy
from posttrain.rollout.engines.vllm import VllmEngine
from posttrain.rollout.engines.vllm_server import WORKER, Server
from posttrain.types import Prompt, Rollout, Sampling

Asked = tuple[Callable[[Any], Any] | dict[str, Any], Future]


class InProcess(Server):
    """A vLLM in this process; ``options`` are those of ``vllm.LLM``."""

    ours = True

    def __init__(self, **options: Any) -> None:
        super().__init__("127.0.0.1:1", deadline=600.0)
        self._options = options
        self._asked: SimpleQueue[Asked | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __str__(self) -> str:
        return "vLLM in this process"

    def start(self, model: Path) -> None:
        if self._thread is None:
            place = tempfile.mkdtemp()  # where vLLM finds what takes the weights, and nothing else
            shutil.copy(WORKER, place)
            sys.path.append(place)
            self._thread = threading.Thread(target=self._run, args=(model,), daemon=True)
            self._thread.start()

    def wait(self, patience: float) -> None:
        self._do(lambda llm: None)

    def load(self, folder: Path) -> None:
        self._call("posttrain_load", str(folder))
        self._do(lambda llm: llm.reset_prefix_cache())

    def complete(
        self, request: dict[str, Any], *, over: Callable[[list[int]], bool] | None = None
    ) -> tuple[list[int], list[float]]:
        if over is not None:
            raise NotImplementedError("stop strings are not measured")
        found = self._do(request)
        drawn = list(found.token_ids)
        return drawn, [at[token].logprob for token, at in zip(drawn, found.logprobs, strict=True)]

    def stop(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _call(self, method: str, *arguments: str) -> Any:
        return self._do(lambda llm: llm.collective_rpc(method, args=arguments)[0])

    def _do(self, what: Callable[[Any], Any] | dict[str, Any]) -> Any:
        future: Future = Future()
        self._asked.put((what, future))
        return future.result()

    def _run(self, model: Path) -> None:
        """The thread that owns vLLM, until it is stopped; what fails is told to whoever waits."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        running: dict[str, Future] = {}
        problem: BaseException | None = None
        try:
            self._serve(model, running)
        except BaseException as error:  # noqa: BLE001 - raised in the threads that ask
            problem = error
        else:
            cleanup_dist_env_and_memory()  # another one may be started behind it
        while problem is not None:
            for future in running.values():
                future.set_exception(problem)
            running = {}
            asked = self._asked.get()
            if asked is None:
                return
            running = {"": asked[1]}

    def _serve(self, model: Path, running: dict[str, Future]) -> None:
        from vllm import LLM

        llm = LLM(
            model=str(model),
            logprobs_mode="processed_logprobs",
            worker_extension_cls="vllm_worker.PolicyWeights",
            **self._options,
        )
        count = 0
        while True:
            try:
                asked = self._asked.get(block=not running)
            except Empty:
                for answer in llm.llm_engine.step():
                    if answer.finished:
                        running.pop(answer.request_id).set_result(answer.outputs[0])
                continue
            if asked is None:
                llm.llm_engine.engine_core.shutdown()
                return
            what, future = asked
            if callable(what):
                future.set_result(what(llm))
                continue
            count += 1
            prompt = {"prompt_token_ids": what["prompt"]}
            llm.llm_engine.add_request(str(count), prompt, _parameters(what))
            running[str(count)] = future


def _parameters(request: Mapping[str, Any]) -> Any:
    """What a server would make of a request."""
    from vllm import SamplingParams

    others = ("prompt", "return_token_ids")
    given = {name: value for name, value in request.items() if name not in others}
    return SamplingParams(**given, detokenize=False)


class EngineVllm:
    """posttrain's vLLM engine: each sequence a request with a seed of its own, weights proven."""

    def __init__(self, setup: Setup, *, share: float = 0.25, **more: Any) -> None:
        import vllm  # noqa: F401 - if it is not there, say so now

        self._setup = setup
        self._model = setup.own_model(torch.float32)
        self.found: list[list[Rollout]] = []
        self._folder = tempfile.TemporaryDirectory()
        memory = {} if setup.device == "cpu" else {"gpu_memory_utilization": share}
        server = InProcess(
            dtype=str(setup.compute).removeprefix("torch."),
            enforce_eager=setup.device == "cpu",
            max_model_len=setup.model.config.max_position_embeddings,
            max_num_seqs=1024,
            **memory,
            **more,
        )
        tokenizer = setup.tokenizer
        policy = Policy(
            model=self._model,
            tokenizer=tokenizer,
            source="random weights",
            end_tokens=(tokenizer.eos_token_id,),
            pad_token=tokenizer.pad_token_id,
        )
        self._engine = VllmEngine(
            policy,
            [server],
            decode=lambda tokens: "",  # the others give tokens, not text
            folder=Path(self._folder.name) / "weights",
            max_sequences=1024,
        )
        weights = SimpleNamespace(weights=lambda: dict(self._model.named_parameters()))
        self._sync = self._engine.sync(weights)  # type: ignore[arg-type]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)
        self._sync(self._engine.version + 1)

    def prepare(self, job: Job) -> str:
        if job.end_tokens is not None:
            raise NotImplementedError("its end tokens are the policy's")
        return "log-probs returned, a seed for each sequence"

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        prompts = [Prompt(id=str(n), text="", tokens=p) for n, p in enumerate(job.prompts)]
        sampling = Sampling(max_new_tokens=job.new_tokens)
        with timed(self._setup.device) as taken:
            self.found = self._engine.generate(prompts, sampling, num_samples=job.group, seed=seed)
        return taken[0], [len(one.tokens) for group in self.found for one in group]

    def close(self) -> None:
        self._engine.close()
        self._folder.cleanup()
        del self._engine, self._sync, self._model
        free(self._setup.device)
