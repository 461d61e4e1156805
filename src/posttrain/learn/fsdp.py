"""The models of a learner over several ranks: FSDP2 shards them, and ranks compute in step.

A layer is gathered where it is computed, and its gradient summed over ranks as soon as it is there
(``fully_shard``; Zhao et al. 2023, arXiv:2304.11277). So ranks must make the same passes, and one
that runs out of memory in the middle of a pass must not leave the others waiting: it makes up for
the collectives that are left with a cheap pass, and then all ranks know of it.

Of a model with adapters these alone are sharded. What they stand beside never changes: every rank
holds it whole, and only adapters and their gradients are sent.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from posttrain.learn.memory import free
from posttrain.learn.ranks import Ranks
from posttrain.learn.trained import Trained
from posttrain.models.adapters import adapted_layers
from posttrain.models.frozen import EarlierAdapter, Reference
from posttrain.models.gpu_memory import ran_out
from posttrain.protocols import Outputs
from posttrain.types import Batch

Result = TypeVar("Result")


class Sharding:
    """The models of a learner, sharded over its ranks, and the passes that all make together.

    The optimisers must not have taken a step yet. A critic with a trunk of its own is a second
    tree of modules; a value head on the policy's trunk belongs to the policy's.
    """

    def __init__(self, ranks: Ranks, *, policy: Trained, critic: Trained | None) -> None:
        self._ranks = ranks
        self._device = next(policy.module.parameters()).device
        self._mesh = init_device_mesh(self._device.type, (ranks.size,))
        self._collectives = _Collectives()
        self._policy, self._adapted = policy.module, bool(adapted_layers(policy.module))
        self._meta_copy = None if self._adapted else _meta_copy(policy.module)
        self._reference: ShardedReference | None = None
        self._roots: dict[int, _Root] = {}
        self._whole: dict[int, Tensor] = {}
        value: Any = None if critic is None else critic.module
        heads = [value.head] if value is not None and value.shared else []
        with _optimizer_follows(policy), _optimizer_follows(critic if heads else None):
            self._roots[id(policy.module)] = self._shard(policy.module, *heads)
        if heads:
            self._roots[id(value)] = self._roots[id(policy.module)]
        elif critic is not None:
            with _optimizer_follows(critic):
                self._roots[id(value)] = self._shard(value)

    def inside(self, module: nn.Module, work: Callable[[], Outputs]) -> Outputs:
        """Do ``work`` with the weights of a module at hand, layer by layer."""
        return Outputs(**self._roots[id(module)](work))

    def together(
        self, work: Callable[[Batch], Result], part: Batch, *, cheap: Callable[[], Batch]
    ) -> Result:
        """One pass of all ranks, each on its own part; out of memory in one, all raise that.

        ``work`` must make the same collectives whatever the part is, the ``cheap`` one too.
        """
        self._begin()
        missed, results = "", []
        try:
            results.append(work(part))
        except Exception as error:
            if not ran_out(error):
                raise
            missed = str(error) or "memory is used up"
        if missed:  # after the handler: until then the traceback keeps tensors alive
            free(self._device)
            self._begin(skip=self._collectives.made)
            work(cheap())
        if self._ranks.any(bool(missed)):
            raise torch.OutOfMemoryError(missed or "another rank ran out of memory")
        return results[0]

    def reference(self, keep: Reference) -> ShardedReference | EarlierAdapter:
        """The policy's weights as they are now: a sharded copy, or one of its adapters alone."""
        if self._adapted:
            return EarlierAdapter(self._policy)
        if self._reference is None:
            model: Any = copy.deepcopy(self._meta_copy)
            for weight in model.parameters():
                weight.data = weight.data.to(keep.dtype or weight.dtype)
            away = keep.offload and self._device.type != "cpu"
            buffers = {name: value.clone() for name, value in model.named_buffers()}
            root = self._shard(model, offload=CPUOffloadPolicy() if away else OffloadPolicy())
            root.to_empty(device="cpu" if away else self._device)
            for name, value in buffers.items():
                model.get_buffer(name).data = value
            self._roots[id(model)] = root
            self._reference = ShardedReference(model)
        self._reference.fill(self._policy)
        return self._reference

    def frozen(self, model: nn.Module) -> ShardedReference:
        """A model that is only asked, sharded."""
        self._roots[id(model)] = self._shard(model.requires_grad_(False), whole=set())
        return ShardedReference(model)

    def saved(self, trained: Trained) -> dict[str, Tensor]:
        """What is in the files of a model, as :meth:`gather` gives it."""
        if self._adapted:
            return self.gather(trained.weights())
        return self.gather(trained.module.state_dict(keep_vars=True))

    def gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole weights in main memory on the first rank; on the others nothing.

        A weight is in the same memory every time, and one that has two names is there once.
        """
        for number, weight in {id(weight): weight for weight in weights.values()}.items():
            whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
            if self._ranks.rank == 0:
                kept = self._whole.setdefault(number, torch.empty_like(whole, device="cpu"))
                kept.copy_(whole)
        if self._ranks.rank:
            return {}
        return {name: self._whole[id(weight)] for name, weight in weights.items()}

    def _shard(
        self,
        *modules: nn.Module,
        offload: OffloadPolicy | None = None,
        whole: set[nn.Parameter] | None = None,
    ) -> _Root:
        """The root of these modules: of the first its layers are units, the others are units.

        ``whole`` weights are not sharded: beside adapters all that does not learn.
        """
        root = _Root(modules)
        if whole is None:
            whole = {w for w in root.parameters() if self._adapted and not w.requires_grad}
        options: dict[str, Any] = {"mesh": self._mesh, "offload_policy": offload or OffloadPolicy()}
        options["ignored_params"] = whole
        for module in (*_layers(modules[0]), *modules[1:]):
            fully_shard(module, **options)
        # Weights kept whole after a pass without gradient would miss the next step.
        fully_shard(root, reshard_after_forward=True, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: averaging is in the batch's weights
                module.set_force_sum_reduction_for_comms(True)
                gather: Any = _Counted(DefaultAllGather(), self._collectives)
                reduce: Any = _Counted(DefaultReduceScatter(), self._collectives)
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
        return root

    def _begin(self, *, skip: int = 0) -> None:
        """Before a pass: FSDP must remember as little of earlier ones as on every other rank."""
        for root in set(self._roots.values()):
            _reset(root)
        self._collectives.begin(skip)


class ShardedReference:
    """A frozen model over several ranks; as :class:`posttrain.models.frozen.Frozen`."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Take the weights of a model that is sharded in the same way."""
        given = dict(model.named_parameters())
        for name, weight in self.weights().items():
            weight.to_local().copy_(given[name].to_local())  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The model, without gradient."""
        with torch.no_grad():
            yield self._model

    def weights(self) -> dict[str, Tensor]:
        """Its weights by name; to be read, or filled in place."""
        return dict(self._model.named_parameters())


class _Root(nn.Module):
    """The root of a tree of sharded modules: what is done in its forward pass has their weights."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, work: Callable[[], Outputs]) -> dict[str, Tensor]:
        """The outputs by name: FSDP looks for tensors, and wants none that is a view."""
        found = vars(work())
        return {name: value.clone() for name, value in found.items() if value is not None}


class _Collectives:
    """Counts the collectives of a pass; those that were made before are skipped."""

    def __init__(self) -> None:
        self.made = self._skip = 0

    def begin(self, skip: int) -> None:
        """A new pass, whose first ``skip`` collectives need not be made."""
        self.made, self._skip = 0, skip

    def skips(self, output: Tensor) -> bool:
        """Whether the next one need not be made; its output is 0 then."""
        if self.made >= self._skip:
            return False
        output.zero_()
        return True


class _Counted:
    """A collective of FSDP (all-gather or reduce-scatter) that is counted once it is made."""

    def __init__(self, collective: Any, collectives: _Collectives) -> None:
        self._collective, self._collectives = collective, collectives
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        skipped = self._collectives.skips(output_tensor)
        work = None if skipped else self._collective(output_tensor, input_tensor, **options)
        self._collectives.made += 1
        return work


def _layers(model: Any) -> list[nn.Module]:
    """The layers of a decoder, each a unit of its own; none where they are not where others are."""
    trunk = getattr(model, "trunk", model)  # of a critic
    decoder = trunk.get_decoder() if hasattr(trunk, "get_decoder") else trunk
    layers = getattr(decoder, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def _meta_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of a model without its weights: a sharded model cannot be copied."""
    weights: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, weights)


@contextlib.contextmanager
def _optimizer_follows(trained: Trained | None) -> Iterator[None]:
    """Inside, a module is sharded: behind it the optimiser has the weights that there are then."""
    if trained is None:
        yield
        return
    before = dict(trained.module.named_parameters())
    yield
    after = dict(trained.module.named_parameters())
    new = {id(weight): after[name] for name, weight in before.items()}
    for group in trained.optimizer.param_groups:
        group["params"] = [new[id(weight)] for weight in group["params"]]


def _reset(root: Any) -> None:
    """Have FSDP forget an unfinished pass, and the order of the one before."""
    if root._get_fsdp_state()._is_root is None:
        return  # before its first pass
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    communication, order = state._comm_ctx, state._state_ctx
    current = communication.device_handle.current_stream()
    for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream"):
        current.wait_stream(getattr(communication, name))
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for each in order.all_states:
        each._training_state = TrainingState.IDLE
        if (group := each._fsdp_param_group) is not None:
            group._all_gather_result = group._post_reduce_event = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    order.iter_forward_root, order.post_backward_final_callback_queued = None, False
