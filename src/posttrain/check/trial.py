"""One optimiser step on real rollouts, measured, and undone to the last bit."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from posttrain.algorithms.diagnostics import share_without_signal
from posttrain.build.algorithm import make_plan
from posttrain.build.declared_ways import declared
from posttrain.build.learners import make_learner
from posttrain.check.bench import Bench, unchanged
from posttrain.data.collate import collate
from posttrain.data.minibatch import micro_batches
from posttrain.pipelines.plan import State, make_objective
from posttrain.pipelines.rl import prepare, weighed
from posttrain.protocols import Learner, StepResult
from posttrain.rollout.collect import has_signal
from posttrain.track.progress import phase
from posttrain.types import Batch, Rollout
from posttrain.types.ways import Way

Result = TypeVar("Result")
# A step faster than these seconds is timed again: the first on a GPU also compiles and captures.
REMEASURED = {"cpu": 5.0, "cuda": 60.0}
TRIED = 64  # rollouts of the trial step


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measurements of one trial step; ``stand_in`` says that the rewards were made up.

    ``mismatch`` is the difference of engine and learner, ``moved`` the change by the step, both of
    log-probs in nats a token; ``activations`` are the bytes that autograd saves for the largest
    micro-batch, which has ``micro_tokens`` of at most ``micro_batch_tokens``; ``ways`` are those
    that engine and learner declare.
    """

    result: StepResult
    mismatch: float
    worst_mismatch: float
    moved: float
    stand_in: bool
    sequences: int
    tokens: int
    activations: int
    micro_tokens: int
    micro_batch_tokens: int
    infer_seconds: float
    step_seconds: float
    ways: Mapping[str, Way]


@dataclass(frozen=True)
class LinearCost:
    """A cost in seconds or bytes as ``fixed + each · n``, from measurements at two sizes."""

    fixed: float
    each: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> LinearCost:
        """The line through two points ``(n, measured)``; neither coefficient is negative.

        >>> LinearCost.through((1, 3.0), (3, 7.0))
        LinearCost(fixed=1.0, each=2.0)
        """
        (few, short), (many, long) = small, large
        slope = (long - short) / (many - few) if many > few else long / many
        slope = min(max(slope, 0.0), long / many)
        return cls(max(long - slope * many, 0.0), slope)

    def __call__(self, count: float) -> float:
        return self.fixed + self.each * count


def some_rollouts(bench: Bench, limit: int) -> list[Rollout]:
    """At most ``limit`` sampled rollouts in whole groups, at least one, those with signal first."""
    order = sorted(bench.groups, key=lambda group: not has_signal(group))
    taken = order[: max(1, limit // len(order[0]))]
    return [replace(r, group=number) for number, group in enumerate(taken) for r in group]


def try_step(bench: Bench) -> None:
    """One step as the run would take it, unless it cannot fit into memory."""
    if not bench.too_large:
        with phase("checking: one step"):
            bench.trial = take_step(bench, TRIED)


def take_step(bench: Bench, limit: int, *, micro_batch_tokens: int | None = None) -> Trial:
    """One step at the peak learning rate on so many rollouts; weights are restored afterwards."""
    rollouts, policy, device = some_rollouts(bench, limit), bench.policy, bench.setup.device
    section = bench.rl.model_copy(
        update={
            "warmup_steps": 0,
            "schedule": "constant",
            "micro_batch_tokens": micro_batch_tokens or bench.rl.micro_batch_tokens,
        }
    )
    plan = make_plan(section)
    # As if after the critic's warm-up, so that the policy takes part in the step.
    state = State(step=plan.critic_warmup, kl=plan.kl, penalty=plan.penalty)
    batch, made_up = _teaching(collate(rollouts, pad_token=policy.pad_token))
    with unchanged(policy):
        learner = make_learner(
            bench.recipe,
            policy,
            section=section,
            device=device,
            total_steps=1,
            reward_model=bench.setup.reward_model,
        )
        batch = learner.infer(batch)
        batch = prepare(batch, learner, plan=plan, state=state)
        ready = weighed(batch, plan)
        objective = make_objective(plan, state, batch=ready)
        parts = micro_batches(ready, learner.micro_batch_tokens)
        with saved_bytes(policy.model) as saved:
            result, seconds = _timed(lambda: learner.step(ready, objective))
        after, infer_seconds = _timed(lambda: learner.infer(batch))
        if seconds < REMEASURED[device]:  # the first step also allocates the optimiser's state
            seconds = _timed(lambda: learner.step(ready, objective))[1]
    longest = max(
        len(r.prompt.tokens) + max(section.max_new_tokens, len(r.tokens)) for r in rollouts
    )
    chosen = batch.active  # nothing is inferred for sequences whose grader broke
    apart = _between(batch.need("old_logprobs"), batch.need("sampler_logprobs"), chosen=chosen)
    moved = _between(after.need("old_logprobs"), batch.need("old_logprobs"), chosen=chosen)
    return Trial(
        result=result,
        mismatch=float(apart.mean()),
        worst_mismatch=float(apart.max()),
        moved=float(moved.mean()),
        stand_in=made_up,
        sequences=len(rollouts),
        tokens=int((batch.attention if batch.attention is not None else batch.mask).sum()),
        activations=saved.most,
        micro_tokens=max(part.tokens.numel() for _, part in parts),
        micro_batch_tokens=learner.micro_batch_tokens,
        infer_seconds=infer_seconds,
        step_seconds=seconds,
        ways=declared(bench.setup, learner, longest=longest, engine=bench.engine),
    )


def weights_owner(bench: Bench) -> Learner:
    """A learner only to sync weights from: without other models it takes no memory."""
    kl = bench.rl.kl.model_copy(update={"placement": "none"})
    section = bench.rl.model_copy(update={"kl": kl, "critic": None})
    recipe = bench.recipe.model_copy(update={"teacher": None})
    return make_learner(
        recipe, bench.policy, section=section, device=bench.setup.device, total_steps=1
    )


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begun = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - begun


def _between(first: Tensor, second: Tensor, *, chosen: Tensor) -> Tensor:
    return (first - second)[chosen].abs().double()


def _teaching(batch: Batch) -> tuple[Batch, bool]:
    """A batch with signal; where it has none, rewards of 0 and 1 in turn stand in."""
    groups = batch.need("groups")
    single = len(groups.unique()) == len(groups)
    valid = batch.need("rewards")[batch.need("valid")]
    agree = len(valid.unique()) < 2 if single else share_without_signal(batch) == 1
    if not agree:
        return batch, False
    numbers = torch.arange(len(groups))
    given = replace(batch, rewards=(numbers % 2).double(), valid=torch.ones(len(groups)) > 0)
    return given, True


class Saved:
    """Peak bytes that autograd saves in a forward pass, without storages that are ``known``."""

    def __init__(self, known: set[int]) -> None:
        self.most = 0
        self._now = 0
        self._known = known
        self._held: Counter[int] = Counter()

    def count(self, tensor: Tensor, by: int) -> Tensor:
        """Count a tensor's storage once, however many views of it are saved or released."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._known:
            before, self._held[place] = self._held[place], max(0, self._held[place] + by)
            self._now += (bool(self._held[place]) - bool(before)) * storage.nbytes()
            self.most = max(self.most, self._now)
        return tensor


@contextlib.contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[Saved]:
    """Counts the bytes that autograd saves inside the block, weights excluded."""
    saved = Saved({weight.untyped_storage().data_ptr() for weight in model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.count(tensor, 1), lambda tensor: saved.count(tensor, -1)
    ):
        yield saved
