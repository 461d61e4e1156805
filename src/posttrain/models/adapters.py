"""Low-rank adapters (LoRA): what is learned is a small product beside each weight, which is kept.

``W x`` becomes ``W x + s·B A x`` with ``A`` of shape [rank, in] and ``B`` of shape [out, rank]
(Hu et al. 2021). The layers of a model are wrapped in place: whoever samples from the model reads
the adapter that learns, so none can be stale. They are ours and not those of ``peft``, because they
must run inside CUDA graphs, compiled layers and packed passes; its files are read and written by
:mod:`posttrain.models.files.adapter_folder`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.models.head import compute_type

Copied = TypeVar("Copied", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The shape of an adapter; ``targets`` are endings of layers' names, and none means all.

    ``quantize`` is how the weights beside it are kept: as they are, or in four bits ("nf4").

    >>> AdapterSettings(rank=16, alpha=32).scale, AdapterSettings(rank=16, rslora=True).scale
    (2.0, 8.0)
    """

    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    quantize: str = "none"

    @property
    def scale(self) -> float:
        """``s = alpha / rank``, or ``alpha / √rank`` (rsLoRA, Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def chooses(self, name: str) -> bool:
        """Whether the layer of this name is adapted."""
        return not self.targets or any(f".{name}".endswith(f".{end}") for end in self.targets)


class Adapter(nn.Module):
    """``s·B A``, the change of one weight, in float32 at least whatever the weight is kept in."""

    def __init__(self, layer: nn.Linear, settings: AdapterSettings) -> None:
        super().__init__()
        self.scale = settings.scale
        weight = layer.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        kind: Any = {"device": weight.device, "dtype": dtype}
        self.A = nn.Parameter(torch.zeros(settings.rank, layer.in_features, **kind))
        self.B = nn.Parameter(torch.zeros(layer.out_features, settings.rank, **kind))

    def forward(self, states: Tensor, found: Tensor) -> Tensor:
        """``found + s·B A states``: [..., in], [..., out] → [..., out], in the type of both."""
        low = linear(states, self.A.to(states.dtype))
        flat = found.reshape(-1, found.shape[-1]), low.reshape(-1, low.shape[-1])
        added = torch.addmm(*flat, self.B.to(states.dtype).t(), alpha=self.scale)  # one kernel
        return added.view(found.shape)

    def change(self) -> Tensor:
        """``s·B A``: [out, in]."""
        return self.scale * (self.B @ self.A)


class AdaptedLinear(nn.Linear):
    """A linear layer with its own weight and bias, and an adapter beside them."""

    def __init__(self, layer: nn.Linear, settings: AdapterSettings) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.adapter = Adapter(layer, settings)
        self.train(layer.training)

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] → [..., out]; casts here are those that autocast would do, each once."""
        kind = compute_type(states)
        states = states.to(kind)
        bias = None if self.bias is None else self.bias.to(kind)
        found: Tensor = self.adapter(states, self.product(states, bias))
        return found

    def product(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """``W x + b``, of what is kept as it is."""
        return linear(states, self.weight.to(states.dtype), bias)


def add_adapters(model: nn.Module, settings: AdapterSettings, *, seed: int) -> None:
    """Freeze a model and put new adapters beside the linear layers of its trunk, in place.

    As in ``peft``, ``A`` is uniform in ±1/√in, decided by ``seed``, and ``B`` is 0: the model stays
    what it was, bit for bit.
    """
    _wrap(model, settings, names=chosen_layers(model, settings))
    draw_adapters(model, seed=seed)


def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """Draw every ``A`` anew, and set every ``B`` to 0, as :func:`add_adapters` does."""
    drawn = torch.Generator().manual_seed(seed)
    for adapted in adapted_layers(model).values():
        weight = adapted.adapter.A
        bound = 1 / math.sqrt(adapted.in_features)
        first = torch.rand(weight.shape, generator=drawn, dtype=weight.dtype) * 2 * bound - bound
        weight.data.copy_(first)
        adapted.adapter.B.data.zero_()


@torch.no_grad()
def load_adapters(
    model: nn.Module, settings: AdapterSettings, *, weights: Mapping[str, Tensor], source: str
) -> None:
    """Freeze a model and put these adapters into it, in place; ``weights`` are by our names.

    Those of a head that was learned beside them are its own from now on, and learn.
    """
    names = [name.removesuffix(".adapter.A") for name in weights if name.endswith(".adapter.A")]
    layers = dict(model.named_modules())
    missing = [name for name in names if not isinstance(layers.get(name), nn.Linear)]
    if missing or not names:
        raise ValueError(
            f"model: the adapter in {source!r} is for another model: its base has no linear layer "
            f"{(missing or ['at all'])[0]}; put the right folder into base_model_name_or_path of "
            "its adapter_config.json"
        )
    _wrap(model, settings, names=names)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in weights)
    own = {name: w for name, w in model.named_parameters() if w.requires_grad}
    wrong = {name for name in own if own[name].shape != weights[name].shape}
    wrong |= weights.keys() - own.keys()
    wrong |= {f"{name}.adapter.B" for name in names} - weights.keys()
    if wrong:
        raise ValueError(
            f"model: the adapter in {source!r} does not fit its base, {min(wrong)} for one; it was "
            "trained on another model, or the file is damaged"
        )
    for name, weight in own.items():
        weight.copy_(weights[name])


def chosen_layers(model: nn.Module, settings: AdapterSettings) -> list[str]:
    """The names of the linear layers to adapt: of the trunk, so not the head."""
    whole: Any = model
    trunk = whole.base_model if hasattr(whole, "base_model") else whole
    inside = {id(layer) for layer in trunk.modules()}
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if _is_linear(layer) and id(layer) in inside and layer is not head
    }
    chosen = [name for name in layers if settings.chooses(name)]
    idle = [t for t in settings.targets if not any(f".{n}".endswith(f".{t}") for n in layers)]
    if idle or not chosen:
        known = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"adapter.targets: no linear layer of this {type(model).__name__} is called "
            f"{(idle or ['anything'])[0]!r}; it has {', '.join(known) or 'none at all'}"
        )
    return chosen


def _is_linear(layer: Any) -> bool:
    return type(layer) is nn.Linear or getattr(layer, "is_plain", False) is True


def _wrap(
    model: nn.Module, settings: AdapterSettings, *, names: list[str]
) -> dict[str, AdaptedLinear]:
    model.requires_grad_(False)
    made: dict[str, AdaptedLinear] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        layer: Any = model.get_submodule(name)
        made[name] = AdaptedLinear(layer, settings)
        if settings.quantize != "none":
            from posttrain.models.quantized import QuantizedLinear  # it stands on this module

            made[name] = QuantizedLinear(made[name])
        setattr(model.get_submodule(parent), last, made[name])
    return made


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers of a model that have an adapter, by name; none where all weights learn."""
    return {name: m for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every adapter to its weight and take it off, in place: ``W + s·B A``."""
    without_adapters(model, added=True)


def without_adapters(model: nn.Module, *, added: bool = False) -> None:
    """Take the adapters off, in place: what is left is the base, and all of it would learn.

    With ``added``, each is added to its weight before.
    """
    for name, adapted in adapted_layers(model).items():
        parent, _, last = name.rpartition(".")
        plain = nn.Linear(adapted.in_features, adapted.out_features, bias=False, device="meta")
        weight = adapted.weight
        if added:
            change = adapted.adapter.change()
            weight = nn.Parameter((weight.to(change.dtype) + change).to(weight.dtype))
        plain.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        plain.bias = adapted.bias
        setattr(model.get_submodule(parent), last, plain.train(adapted.training))


def round_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the weights beside adapters in the type that they are computed in: nothing trains them.

    The results are the same: autocast would round them so at every use.
    """
    for adapted in adapted_layers(model).values():
        if isinstance(adapted.weight, nn.Parameter):  # one in four bits stays so
            adapted.weight.data = adapted.weight.data.to(dtype)


def copy_of_trained(module: Copied) -> Copied:
    """A copy that shares every weight that does not learn: of a model with adapters, the base."""
    shared: Any = {id(w): w for w in module.parameters() if not w.requires_grad}
    return copy.deepcopy(module, shared)
