"""The learner on one device: fp32 master weights, exact averaging, one optimiser step at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from posttrain.data.minibatch import micro_batches
from posttrain.fast.score import (
    Against,
    CapturedPasses,
    Replicas,
    captured_passes,
    computing_in,
    pausing,
    replaying,
    replicas_for,
    score_tokens,
    shares_prompts,
    states_before,
)
from posttrain.learn.checkpoint import load_learner, save_learner
from posttrain.learn.learning_way import check_compared, check_room, learning_way
from posttrain.learn.memory import free, keep_freed, not_repeated, smaller, until_it_fits
from posttrain.learn.micro_batch_size import tokens_for
from posttrain.learn.ranks import ALONE, Ranks, cheapest
from posttrain.learn.sums import Sums, replicated
from posttrain.learn.trained import Applied, Schedule, Trained
from posttrain.models.frozen import Frozen, Reference
from posttrain.models.reward import scores
from posttrain.protocols import Objective, Outputs, StepResult
from posttrain.types import Batch
from posttrain.types.ways import Support, Way

if TYPE_CHECKING:
    from posttrain.learn.fsdp import ShardedReference, Sharding

Forward = Callable[..., Outputs]
Ask = Callable[[Batch], Tensor | None]
Result = TypeVar("Result")


class LocalLearner:
    """Trains one model in this process, and beside it a critic where there is one.

    ``forward`` is what the model is asked: a policy's log-probs (:func:`score_tokens` with the
    sampler's temperature; what ``top_k`` or ``top_p`` cut off stays in, and the truncated
    importance correction compensates), or a reward model's :func:`posttrain.models.reward.scores`.
    ``micro_batch_tokens`` bounds a forward pass and cannot change the result; "auto" tries before
    the first one what fits, beside a sampler that runs at the same time (``beside_sampling``).
    ``keep_groups`` never parts the sequences of a group, for losses that compare them.
    A ``teacher`` scores the same tokens as the policy, and is never trained; ``infer`` asks it
    unless ``teacher_infers`` is off, because the loss takes distributions alone from it.
    ``compute`` is what the forward pass runs in. With ``captured``, passes are replayed from CUDA
    graphs; with ``replicas``, this many threads of a CPU make those of a step, where there is no
    critic and no teacher. Over several ``ranks`` the models are sharded: each must be asked the
    same, and the first calls ``save``, with the whole ``weights``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        save: Callable[..., None],
        forward: Forward = score_tokens,
        schedule: Schedule = lambda step: 1.0,
        max_gradient_norm: float = 1.0,
        micro_batch_tokens: int | Literal["auto"] = "auto",
        beside_sampling: bool = False,
        keep_groups: bool = False,
        compute: torch.dtype = torch.float32,
        reference: Reference | None = None,
        critic: Trained | None = None,
        teacher: nn.Module | None = None,
        teacher_infers: bool = True,
        captured: bool = False,
        replicas: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        self.version = 0
        self.model = model
        self.ranks = ranks
        limit = max_gradient_norm
        self.trained = Trained(model, optimizer, schedule=schedule, max_gradient_norm=limit)
        self.critic = critic
        self._teacher: Any = teacher
        self._teacher_infers = teacher_infers
        self._keep = reference
        self._ask = forward
        self._compute = compute
        self._sharding = self._sharded() if ranks.size > 1 else None
        self.reference = None if reference is None else self._frozen(reference)
        self._taught_by = None if teacher is None else self._asked_only(teacher)
        self.refreshed = False
        """Whether the reference is no longer what the learner started from."""
        self._save = save
        self._micro_batch_tokens = self.asked_tokens = micro_batch_tokens
        self._beside_sampling = beside_sampling
        self._keep_groups = keep_groups
        self._captured: tuple[CapturedPasses, ...] = ()
        keep_freed(self.device)
        alone = critic is None and teacher is None and ranks.size == 1
        several = replicas_for(model, replicas) > 1
        self._replicas = Replicas(model, replicas) if alone and several else None
        if captured and self.device.type == "cuda" and self._sharding is None:
            modules = (model, *(part.module for part in (critic,) if part is not None))
            self._captured = captured_passes(*modules, compute=compute)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a forward pass; "auto" is measured on first use."""
        if not isinstance(self._micro_batch_tokens, int):
            self._micro_batch_tokens = self._fitting_tokens()
        return self._micro_batch_tokens

    def restore_tokens(self, tokens: int, *, asked: int | str) -> None:
        """Resume with the micro-batch size of a checkpoint, if the same was ``asked`` for."""
        if asked == self.asked_tokens:
            self._micro_batch_tokens = tokens

    def share(self, other: LocalLearner) -> None:
        """Use the passes that a learner of the same module has captured, and its micro-batches."""
        if len(self._captured) == len(other._captured):
            self._captured = other._captured
        self.restore_tokens(other.micro_batch_tokens, asked=other.asked_tokens)

    def infer(self, batch: Batch) -> Batch:
        """Add ``old_logprobs``, and with a critic, a reference or a teacher what those say."""
        return self._in_memory(lambda: self._inferred(batch), batch)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step; a batch without an active token changes nothing.

        Nor does one whose loss or gradient is not finite, of the policy or of the critic: the step
        is skipped for both. A sequence whose weights are all 0 has no gradient: it only gets a
        forward pass, for the diagnostics.
        """
        learning = [part for part in (self.trained, self.critic) if part is not None]
        learning = learning[1:] if objective.only_critic else learning
        if not learning:
            raise ValueError("only_critic: this learner has no critic")
        sums = self._in_memory(lambda: self._summed(batch, objective, learning=learning), batch)
        if sums.empty:
            rate = learning[0].learning_rate
            return StepResult(loss=0.0, gradient_norm=0.0, learning_rate=rate, metrics={})
        norms = [part.norm() for part in learning]
        finite = all(math.isfinite(float(number)) for number in (sums.loss, *norms))
        with not_repeated():
            applied = {
                part is self.critic: part.apply(norm) if finite else part.skip(norm)
                for part, norm in zip(learning, norms, strict=True)
            }
        still = Applied(gradient_norm=0.0, learning_rate=self.trained.learning_rate)
        result = sums.result(applied.get(False, still), critic=applied.get(True))
        tokens = sums.tokens(batch.tokens.shape[1], self.ranks)
        return replace(result, skipped=not finite, tokens=tokens)

    def refresh_reference(self) -> None:
        """Make the current weights the new reference."""
        self._keep = self._keep or Reference()
        self.reference = None  # free the old copy before the new one is made
        self.reference = self._frozen(self._keep)
        self.refreshed = True

    def weights(self) -> dict[str, Tensor]:
        """The parameters that learn by name; of several ranks the first has copies of them."""
        weights = self.trained.weights()
        return weights if self._sharding is None else self._sharding.gather(weights)

    def save(self, folder: Path) -> None:
        """Write the model folder; of several ranks the first one does."""
        if self._sharding is None:
            self._save(folder)
        elif whole := self._sharding.saved(self.trained):
            self._save(folder, weights=whole)

    def state(self, folder: Path) -> dict[str, Any]:
        """Write everything that the next step depends on; the numbers among it are returned."""
        return save_learner(self, folder)

    def restore(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Become what :meth:`state` wrote."""
        load_learner(self, folder, numbers=numbers)

    def _in_memory(self, work: Callable[[], Result], batch: Batch) -> Result:
        """Do ``work`` on micro-batches of ``batch``; after out-of-memory, again with smaller ones.

        ``work`` must be safe to repeat from the start.
        """

        def shrink(reason: str) -> None:
            for part in (self.trained, self.critic):
                if part is not None:
                    part.clear()
            for one in self._captured:  # smaller parts begin with none
                one.forget()
            free(self.device)
            self._micro_batch_tokens = smaller(
                self.micro_batch_tokens, lambda tokens: len(self._cut(batch, tokens)), reason=reason
            )

        for one in self._captured:
            one.refresh()
        return until_it_fits(work, shrink)

    def _inferred(self, batch: Batch) -> Batch:
        known = batch  # all models see the batch as it came, without the fields added below
        with torch.no_grad():
            batch = batch.replace(old_logprobs=self._in_micro_batches(known, self._policy))
            if self.critic is not None:
                batch = batch.replace(values=self._in_micro_batches(known, self._value))
        taught_by = self._taught_by if self._teacher_infers else None
        for name, frozen in {"ref": self.reference, "teacher": taught_by}.items():
            if frozen is not None:
                with frozen.on_device() as model:  # not captured: it may be the model that learns
                    ask = functools.partial(self._policy, model=model)
                    found = self._in_micro_batches(known, ask, replayed=False)
                batch = batch.replace(**{f"{name}_logprobs": found})
        return batch

    def _summed(self, batch: Batch, objective: Objective, *, learning: list[Trained]) -> Sums:
        """Forward and backward of all micro-batches, after the gradients are cleared."""
        for trained in learning:
            trained.clear()
        sums = Sums(objective.recorded)
        teaches = (batch.need("weights") != 0).any(dim=1) | self._keep_groups
        for learns, chosen in ((True, teaches), (False, ~teaches)):
            places = chosen.nonzero()[:, 0]
            rows = batch.select(places)
            if bool(rows.active.any()):
                with torch.set_grad_enabled(learns):
                    self._add_all(rows, objective, sums=sums, places=places)
        if not bool((teaches & batch.active.any(dim=1)).any()):
            for part in learning:  # gradients of 0, not None: the optimiser applies its momentum
                part.fill()
        return sums.over(self.ranks)

    def _add_all(self, batch: Batch, objective: Objective, *, sums: Sums, places: Tensor) -> None:
        """Forward, and backward where gradients are enabled: here, or by the replicas' threads."""
        work = functools.partial(self._in_turn, objective=objective)
        if self._replicas is None or not self._replicas.take(objective.terms):
            work(batch, sums=sums, places=places, model=self.model)
        else:
            self._shares_prompts(batch.tokens.shape[1])  # asked now: it changes the model meanwhile
            among: Any = {"replicas": self._replicas, "keep_groups": self._keep_groups}
            replicated(work, batch, sums=sums, places=places, **among)

    def _in_turn(
        self, batch: Batch, *, objective: Objective, sums: Sums, places: Tensor, model: nn.Module
    ) -> None:
        """Forward, and backward where gradients are enabled, one micro-batch after the other."""
        learn = functools.partial(self._learn, objective=objective, model=model)
        for rows, part in self._cut(batch):
            counted = sums if len(rows) else Sums()  # a pass without rows only keeps step
            work = functools.partial(learn, sums=counted, places=places[rows])
            self._pass(work, part, whole=batch)

    def _learn(
        self, rows: Batch, *, objective: Objective, sums: Sums, places: Tensor, model: nn.Module
    ) -> None:
        part = rows.to(self.device)
        wanted = objective.divergence
        check_compared(wanted, None if self._sharding is not None else self._teacher)
        outputs = self._outputs(
            part, model=model, only_critic=objective.only_critic, divergence=wanted
        )
        if rows.old_logprobs is None and outputs.logprobs is not None:
            # Without inferred log-probs this is the first and only step on the batch: π is π_old.
            part = part.replace(old_logprobs=outputs.logprobs.detach())
        terms = objective(outputs, part)
        sums.record(places, outputs, terms=terms)
        sums.add_and_backward(terms, part)
        del outputs  # its graph holds nodes of the weights, which a capture must not meet

    def _outputs(
        self, part: Batch, *, model: nn.Module, only_critic: bool, divergence: Any = None
    ) -> Outputs:
        """The outputs of policy and critic, with gradient; a shared value head costs no pass."""
        critic: Any = None if self.critic is None else self.critic.module
        asked = {} if divergence is None else {"against": Against(self._teacher, divergence)}
        with self._precision(), replaying(*self._captured):
            if critic is None:
                return self._asked(model, part, **asked)
            if only_critic:
                return self._valued(part)
            if critic.shared:
                return self._asked(model, part, value_head=critic.head, **asked)
            policy = self._asked(model, part, **asked)
            return replace(policy, values=self._valued(part).values)

    def _policy(self, part: Batch, *, model: nn.Module | None = None) -> Tensor:
        return self._asked(model or self.model, part).need("logprobs")

    def _asked(self, model: nn.Module, part: Batch, **options: Any) -> Outputs:
        return self._inside(model, functools.partial(self._ask, model, part, **options))

    def _value(self, part: Batch) -> Tensor:
        return self._valued(part).need("values")

    def _valued(self, part: Batch) -> Outputs:
        assert self.critic is not None
        critic = self.critic.module
        return self._inside(critic, lambda: Outputs(values=critic(part, states=states_before)))

    def _inside(self, module: nn.Module, work: Callable[[], Outputs]) -> Outputs:
        return work() if self._sharding is None else self._sharding.inside(module, work)

    def _pass(self, work: Callable[[Batch], Result], part: Batch, *, whole: Batch) -> Result:
        """Do ``work`` on a part of a batch; all ranks do so together, each on its own part."""
        if self._sharding is None:
            return work(part)
        cheap = functools.partial(cheapest, whole, keep_groups=self._keep_groups)
        return self._sharding.together(work, part, cheap=cheap)

    def _in_micro_batches(self, batch: Batch, ask: Ask, *, replayed: bool = True) -> Tensor:
        """``ask`` applied to all micro-batches, joined on the CPU. Shapes: [B, T]."""
        captured = self._captured if replayed else ()
        result = torch.zeros(batch.tokens.shape, dtype=torch.float32)

        def asked(part: Batch) -> Tensor:
            with self._precision(), replaying(*captured):
                found = ask(part.to(self.device))
            assert found is not None, "a policy gives log-probs"
            return found.cpu()

        for rows, part in self._cut(batch):
            found = self._pass(asked, part, whole=batch)
            result = result.to(found.dtype)
            result[rows, : found.shape[1]] = found[: len(rows)]
        return self.ranks.total(result)

    def _cut(self, batch: Batch, tokens: int | None = None) -> list[tuple[Tensor, Batch]]:
        cut = functools.partial(
            micro_batches,
            max_tokens=tokens or self.micro_batch_tokens,
            keep_groups=self._keep_groups,
            share_prompts=bool(self._shares_prompts(batch.tokens.shape[1])),
        )
        return self.ranks.cut(batch, cut, keep_groups=self._keep_groups)

    def _fitting_tokens(self) -> int:
        learning = [part for part in (self.trained, self.critic) if part is not None]
        beside = {"beside_sampling": self._beside_sampling, "replayed": bool(self._captured)}
        return tokens_for(learning, self._try, ranks=self.ranks, **beside)

    def _try(self, batch: Batch) -> None:
        """Forward and backward of a batch, to measure memory; only the gradients remain."""
        self._pass(self._tried, batch, whole=batch)

    def _tried(self, batch: Batch) -> None:
        with torch.enable_grad(), pausing(*self._captured):
            outputs = self._outputs(batch.to(self.device), model=self.model, only_critic=False)
            answers = (outputs.logprobs, outputs.scores, outputs.values)
            given = [answer.sum() for answer in answers if answer is not None]
            torch.stack(given).sum().backward()

    def way(self, longest: int) -> Way:
        """How it computes sequences of at most ``longest`` tokens; raises where it cannot."""
        check_room(self._teacher, longest)
        packed = self._shares_prompts(longest)
        among: Any = {"ranks": self.ranks.size, "replicas": self._replicas and self._replicas.count}
        return learning_way(packed, captured=self._captured, device=self.device, **among)

    def _shares_prompts(self, longest: int) -> Support:
        """Whether a forward pass computes a prompt once for all its completions."""
        if self._ask is scores:
            return Support("a reward model reads rows")
        with self._precision():  # the first that does not is why
            critic = getattr(self.critic and self.critic.module, "trunk", None)
            models = [model for model in (self.model, critic, self._teacher) if model is not None]
            return min((shares_prompts(model, longest) for model in models), key=bool)

    def _sharded(self) -> Sharding:
        from posttrain.learn.fsdp import Sharding  # not for one rank: it takes a while to import

        self._shares_prompts(8)  # models are probed now: one that is sharded is no longer whole
        return Sharding(self.ranks, policy=self.trained, critic=self.critic)

    def _frozen(self, keep: Reference) -> Frozen | ShardedReference:
        return keep.of(self.model) if self._sharding is None else self._sharding.reference(keep)

    def _asked_only(self, model: nn.Module) -> Frozen | ShardedReference:
        return Frozen(model) if self._sharding is None else self._sharding.frozen(model)

    def _precision(self) -> AbstractContextManager[Any]:
        return computing_in(self._compute, self.device)
