"""vLLM as an engine: servers in an environment of their own, asked over HTTP.

Weights travel as a model folder that the servers can read; adapters as one of ``peft``, which vLLM
puts beside the base that it was started on. After every update each server proves by log-probs that
it samples from these weights: an update that failed in silence stops the run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.score import score_tokens
from posttrain.models.load import Policy, load_policy
from posttrain.models.logprobs import score_tokens as score_whole
from posttrain.models.save import save_policy, write_base
from posttrain.models.stops import Decode, cut_at_stop, may_have_stopped, tail_length
from posttrain.protocols import Learner, Reply, Sync
from posttrain.rollout.engines.conversation import Replies, begun, by_prompt
from posttrain.rollout.engines.draws import sampled_turns
from posttrain.rollout.engines.requests import check_num_samples, check_prompts
from posttrain.rollout.engines.vllm_fleet import Fleet, Probe
from posttrain.rollout.engines.vllm_server import HEALTH_DEADLINE, OwnServer, Server
from posttrain.rollout.engines.weight_probe import SAMPLES, WeightProbe
from posttrain.track.progress import advance, phase
from posttrain.types import Batch, Part, Prompt, Rollout, Sampling, Turn
from posttrain.types.ways import Way

PYTHON = "POSTTRAIN_VLLM_PYTHON"  # the variable that names the Python of vLLM's environment
WORKER_ARGUMENTS = (
    *("--worker-extension-cls", "vllm_worker.PolicyWeights"),
    *("--logprobs-mode", "processed_logprobs"),
)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started with
POLL = 0.2  # seconds between two chances to break off

Score = Callable[[Batch], Tensor]


class VllmEngine:
    """Samples from vLLM servers, each sequence a request of its own with a seed of its own.

    ``folder`` is where weights are written and the servers read them; ``temperature`` is that of
    the log-probs that the learner gives, which the servers' are compared with.
    """

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[Server],
        *,
        decode: Decode,
        folder: Path,
        temperature: float = 1.0,
        max_sequences: int = 256,
        deadline: float = 600.0,
    ) -> None:
        if policy.adapter is not None and policy.adapter.quantize != "none":
            raise ValueError(
                f"rl.engine: the base of {policy.source!r} is quantised, and vLLM's is not; use "
                f'"native", or merge it first: posttrain merge {policy.source} NEW'
            )
        self.version = 0
        self._policy, self._decode = policy, decode
        self._folder, self._updates = folder, 0
        self._max_sequences = max_sequences
        config = policy.model.config.get_text_config()
        # Of tokens from all over the vocabulary.
        asked = tuple((1 + 7919 * place) % config.vocab_size for place in range(8))
        prompt = Prompt(id="probe", text="", tokens=asked)
        self._probed = WeightProbe(prompt=prompt, temperature=temperature)
        self._fleet = Fleet(servers, config=config, probe=self._probe, deadline=deadline)

        try:
            with phase("starting vLLM"):
                write_base(policy)
                named = policy.model.named_parameters()
                sent = {n: w for n, w in named if policy.adapter is None or ".adapter." in n}
                self._update(sent, score=self._score, patience=HEALTH_DEADLINE)
        except BaseException:
            self.close()
            raise

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
        """``num_samples`` rollouts of each prompt; a sequence never waits for another's turn."""
        check_num_samples(num_samples)
        limit = min(server.longest for server in self._fleet.servers if server.longest)
        check_prompts(prompts, sampling, limit=limit)
        self._fleet.look_after()
        rollouts = begun(prompts, num_samples=num_samples, part=part)
        first = part.turn if part else 0

        def sample(number: int) -> Turn:
            rollout = rollouts[number]
            turn = first + sum(each.sampled for each in rollout.turns)
            own = _seed(seed, number, turn=turn)
            return self._turn((*rollout.prompt.tokens, *rollout.tokens), sampling, seed=own)

        replies = Replies(reply, longest=limit - sampling.max_new_tokens)
        with self._fleet.threads(min(len(rollouts), self._max_sequences)) as pool:
            running = {pool.submit(sample, number): number for number in rollouts}
            while running or replies.later:
                for number, turn in _finished(running, beside=replies.later):
                    turns = (*rollouts[number].turns, turn)
                    rollouts[number] = replace(rollouts[number], turns=turns)
                    replies.ask(rollouts[number], number)
                for number, answered in (replies.at_once() | replies.come()).items():
                    if answered is not None:
                        rollouts[number] = answered
                        running[pool.submit(sample, number)] = number
        self._fleet.check_kept()
        self._fleet.tell()
        return by_prompt(rollouts, num_samples)

    def sync(self, learner: Learner) -> Sync:
        """The learner's weights go through a folder; its own log-probs are the proof.

        Where weights came without the learner, our model takes them, and is asked in its place.
        """

        def score(batch: Batch) -> Tensor:
            if hasattr(learner, "infer"):
                return learner.infer(batch).need("old_logprobs")
            self._policy.model.load_state_dict(learner.weights(), strict=False)
            return self._score(batch)

        def update(version: int) -> None:
            with self._fleet.updating():
                self._update(learner.weights(), score=score)
                self.version = version
            self._fleet.tell()

        return update

    def close(self) -> None:
        """End the servers that are ours, and remove the weights."""
        for server in self._fleet.servers:
            server.interrupt(self)
            server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def way(self) -> Way:
        """How many servers it asks."""
        return Way(uses=(f"vLLM servers: {len(self._fleet.servers)}",))

    def _turn(self, tokens: Sequence[int], sampling: Sampling, *, seed: int) -> Turn:
        """The next turn of a sequence; a stop string is found in our text of it, not in vLLM's."""
        ends, stop = self._policy.end_tokens, sampling.stop

        def over(drawn: list[int]) -> bool:
            tail = drawn[-tail_length(stop, new=1) :]
            maybe = may_have_stopped(tail, self._decode, stop=stop)
            return maybe and cut_at_stop(drawn, self._decode, stop=stop) is not None

        with self._fleet.sampling():
            version = self.version
            drawn, logprobs = self._fleet.complete(
                _request(tokens, sampling, seed=seed, ends=ends), over=over if stop else None
            )
        (turn,) = sampled_turns(
            torch.tensor([drawn]),
            torch.tensor([logprobs], dtype=torch.float64),
            lengths=[len(drawn)],
            end_tokens=ends,
            decode=self._decode,
            version=version,
            stop=stop,
        )
        return turn

    def _update(
        self, weights: Mapping[str, Tensor], *, score: Score, patience: float = 0.0
    ) -> None:
        """Write the weights, bring them to the servers, and see that they have arrived."""
        kind = {server.dtype for server in self._fleet.servers} - {""}
        dtype = getattr(torch, kind.pop()) if len(kind) == 1 else None  # as they will compute
        for name, weight in weights.items():
            if not bool(weight.isfinite().all()):
                raise ValueError(
                    f"sync: {name} has NaN or infinity: the weights have diverged. Lower the "
                    "learning rate and resume from an earlier checkpoint"
                )
        before, self._updates = self._folder / str(self._updates), self._updates + 1
        folder = self._folder / str(self._updates)
        defaults = self._policy.model.generation_config  # saving gives it another
        sent = {name: weight.detach().to("cpu", dtype) for name, weight in weights.items()}
        save_policy(self._policy, folder, weights=sent)
        self._policy.model.generation_config = defaults

        self._fleet.update(
            folder,
            score=lambda probe: self._probed.scored([probe], score)[0],
            noise=lambda probe: self._noise(probe, folder),
            patience=patience,
        )
        shutil.rmtree(before, ignore_errors=True)

    @torch.no_grad()
    def _score(self, batch: Batch) -> Tensor:
        model, temperature = self._policy.model, self._probed.temperature
        found = score_tokens(model, batch.to(model.device), temperature=temperature)
        return found.need("logprobs")

    def _noise(self, probe: Probe, folder: Path) -> float:
        """How far a server's half precision moves the log-probs of the weights that were sent.

        Its logits are in that precision, too: at 40, two of bfloat16 are a quarter of a nat apart.
        Both sides are of those weights: beside the learner's, wrong ones would seem to be rounded.
        """
        half = {server.dtype for server in self._fleet.servers} & {"bfloat16", "float16"}
        if not half:
            return 0.0

        @torch.no_grad()
        def plainly(batch: Batch, *, dtype: str) -> Tensor:
            model = load_policy(str(folder), dtype=dtype).model  # the GPU may be full
            found = score_whole(model, batch, temperature=self._probed.temperature)
            return found.need("logprobs")

        exact, rounded = (
            self._probed.scored([probe], partial(plainly, dtype=dtype))[0]
            for dtype in ("float32", half.pop())
        )
        pairs = zip(exact, rounded, strict=True)
        apart = [torch.tensor(one.logprobs) - torch.tensor(two.logprobs) for one, two in pairs]
        return float(torch.cat(apart).abs().mean())

    def _probe(self, server: Server) -> Probe:
        """What a server says to the prompt of the probe."""
        found = []
        for number in range(SAMPLES):
            prompt, sampling = self._probed.prompt.tokens, self._probed.sampling
            request = _request(prompt, sampling, seed=number, ends=())
            tokens, logprobs = server.complete(request)
            found.append(Turn(tokens=tuple(tokens), logprobs=tuple(logprobs), text=""))
        return found


def vllm_engine(
    policy: Policy,
    decode: Decode,
    *,
    compute: str = "auto",
    max_sequences: int = 256,
    python: str | None = None,
    address: str | list | None = None,
    arguments: list | None = None,
    folder: str | None = None,
    temperature: float | None = None,
    deadline: float = 600.0,
) -> VllmEngine:
    """vLLM: a server that is started in its own environment, or those at ``address``."""
    if max_sequences < 1 or deadline <= 0:
        raise ValueError("vllm: max_sequences and deadline must be above 0")
    addresses = [address] if isinstance(address, str) else address or []
    servers = [Server(each, deadline=deadline) for each in addresses]
    executable = "" if servers else _python(python)
    place = Path(folder or tempfile.gettempdir()).expanduser().resolve()
    own = Path(tempfile.mkdtemp(prefix="vllm-", dir=place))
    if servers:
        own.chmod(0o755)  # they may run as another user
    else:
        half = policy.model.device.type == "cuda" if compute == "auto" else compute == "bfloat16"
        given = [
            *("--host", "127.0.0.1", "--dtype", "bfloat16" if half else "float32"),
            *("--generation-config", "vllm", "--max-num-seqs", str(max_sequences)),
            *WORKER_ARGUMENTS,
            *(["--enforce-eager"] if policy.model.device.type == "cpu" else []),
            *_for_adapters(policy),
            *map(str, arguments or []),
        ]
        log = (place if folder else own) / "vllm.log"
        options: dict[str, Any] = {"arguments": given, "folder": own, "deadline": deadline}
        servers = [OwnServer(executable, log=log, base=policy.base, **options)]
    return VllmEngine(
        policy,
        servers,
        decode=decode,
        folder=own,
        temperature=1.0 if temperature is None else temperature,
        max_sequences=max_sequences,
        deadline=deadline,
    )


def _for_adapters(policy: Policy) -> list[str]:
    """What a server is started with to take adapters of this rank; it knows some ranks alone."""
    if policy.adapter is None:
        return []
    fitting = [rank for rank in LORA_RANKS if rank >= policy.adapter.rank]
    if not fitting:
        raise ValueError(
            f"adapter.rank: {policy.adapter.rank}, and vLLM takes at most {LORA_RANKS[-1]}; lower "
            'it, or set rl.engine to "native"'
        )
    return ["--enable-lora", "--max-lora-rank", str(fitting[0])]


def _python(given: str | None) -> str:
    """The Python of vLLM's environment."""
    python = given or os.environ.get(PYTHON)
    here = importlib.util.find_spec("vllm")
    if python is None and here is not None and here.origin is not None:  # no mere folder
        python = sys.executable
    if python is None or shutil.which(python) is None:
        missing = f"there is no Python {python!r}" if python else "it is not installed here"
        raise ValueError(
            f"vllm: {missing}; name the Python of its environment as the option python, or in "
            f"{PYTHON} (docs/engines.md says how to make one)"
        )
    return python


def _request(
    tokens: Sequence[int], sampling: Sampling, *, seed: int, ends: Sequence[int]
) -> dict[str, Any]:
    """A request in which no default of the server or of the model has a say."""
    return {
        "prompt": list(tokens),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "logprobs": 0,
        "stop_token_ids": list(ends),
        "ignore_eos": True,  # the end tokens are those above
        "return_token_ids": True,
    }


def _seed(seed: int, number: int, *, turn: int) -> int:
    """The seed of a turn of a sequence: below 2⁶³, and unlike that of any other."""
    digest = hashlib.sha256(f"{seed} {number} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _finished(
    running: dict[Future[Turn], int], *, beside: Collection[Future[Any]]
) -> Iterator[tuple[int, Turn]]:
    """Those that are done, taken out; asked for again and again, so that it can be broken off.

    None where one of those ``beside`` is done first.
    """
    done, _ = wait([*running, *beside], timeout=POLL, return_when=FIRST_COMPLETED)
    for future in done & running.keys():
        advance()
        yield running.pop(future), future.result()
