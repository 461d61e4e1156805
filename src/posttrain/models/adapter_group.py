"""Several adapters on one base: each learns in its turn, and all are sampled in one batch.

To learn, an adapter is put into the model in the place of the one before: whoever holds the model
computes with that one, as if there were no other. To sample, a copy of the model that shares the
base has all of them side by side: ``W x`` is computed once for all rows, then ``A x`` of all
adapters, of which each row keeps its own (:class:`AdapterChoice`), and ``B`` of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.models.adapters import (
    AdapterSettings,
    adapted_layers,
    copy_of_trained,
    draw_adapters,
)

_CHOICE = "_posttrain_adapter_choice"
_SHAPES = {"rank", "alpha", "targets", "rslora"}  # what is known here of an adapter


class OwnTokens(tuple[int, ...]):
    """Tokens as one adapter reads them: another has other keys and values for the same ones.

    >>> OwnTokens((5, 6), 0) == OwnTokens((5, 6), 0), OwnTokens((5, 6), 0) == OwnTokens((5, 6), 1)
    (True, False)
    """

    adapter: int

    def __new__(cls, tokens: Iterable[int], adapter: int) -> OwnTokens:
        made = super().__new__(cls, tokens)
        made.adapter = adapter
        return made

    def __eq__(self, other: object) -> bool:
        own = isinstance(other, OwnTokens) and other.adapter == self.adapter
        return own and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self.adapter, tuple(self)))


class AdapterChoice:
    """Which adapter each row of a pass has; copies of the model share it."""

    def __init__(self, number: int, rank: int, *, device: torch.device) -> None:
        self._owner = torch.arange(number, device=device).repeat_interleave(rank)
        self.others = torch.zeros(1, number * rank, dtype=torch.bool, device=device)

    def choose(self, adapters: Tensor, width: int = 1) -> None:
        """Say it for a pass over rows of ``width`` tokens each: [rows]."""
        others = adapters[:, None] != self._owner  # [rows, adapters · rank]
        self.others = others.repeat_interleave(width, 0) if width > 1 else others

    def kept(self, low: Tensor, *, siblings: int = 1) -> Tensor:
        """``A x`` of all adapters with 0 for those that a row does not have, of fused layers too.

        Not a product with 0: what another adapter makes of these states may not be finite.
        """
        return low.masked_fill(self.others.repeat(1, siblings), 0.0)

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterChoice:
        return self


class SideBySide(nn.Module):
    """The adapters of a layer: ``A`` [adapters · rank, in], ``B`` [out, adapters · rank].

    The scale is that of the first, and in each ``B`` is what its own differs from that.
    """

    def __init__(self, layer: Any, number: int, *, choice: AdapterChoice) -> None:
        super().__init__()
        first = layer.adapter
        self.choice, self.scale = choice, first.scale
        self.A = nn.Parameter(first.A.detach().repeat(number, 1), requires_grad=False)
        self.B = nn.Parameter(first.B.detach().repeat(1, number), requires_grad=False)

    def forward(self, states: Tensor, found: Tensor) -> Tensor:
        """``found + s·B A states``, each row by its own adapter: [..., in], [..., out]."""
        low = linear(states, self.A.to(states.dtype))
        kept = self.choice.kept(low.reshape(-1, low.shape[-1]))
        flat = found.reshape(-1, found.shape[-1])
        added = torch.addmm(flat, kept, self.B.to(states.dtype).t(), alpha=self.scale)
        return added.view(found.shape)


class AdapterGroup:
    """The adapters of one model, which has one of them at a time."""

    def __init__(self, model: Any, number: int) -> None:
        layers = list(adapted_layers(model).values())
        self.model, self.number = model, number
        self._adapters = [layer.adapter for layer in layers]
        self._weights = [w.detach() for each in self._adapters for w in (each.A, each.B)]
        self._first = [weight.clone() for weight in self._weights]
        self._kept: dict[int, list[Tensor]] = {}
        self.scales: dict[int, float] = {}
        self._inside: int | None = None
        self.sampled = self._side_by_side()

    def add(
        self,
        member: int,
        settings: AdapterSettings,
        *,
        weights: Mapping[str, Tensor] | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin an adapter: with ``weights`` by name, drawn by a ``seed``, or as the model came."""
        strange = [
            field.name
            for field in fields(settings)
            if field.name not in _SHAPES and getattr(settings, field.name) != field.default
        ]
        if strange:
            raise ValueError(f"adapter.{strange[0]}: not yet with several adapters; drop it")
        if self._inside is not None:
            self._take_out()
        self._inside = None
        self._copy(self._first, self._weights)
        if seed is not None:
            draw_adapters(self.model, seed=seed)
        if weights is not None:
            self._load(weights)
        self._kept[member] = [weight.clone() for weight in self._weights]
        self.scales[member] = settings.scale
        self.put(member)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights over by name: exactly those that the adapters of this model have."""
        inside = {id(w) for each in self._adapters for w in (each.A, each.B)}
        own = {n: w.detach() for n, w in self.model.named_parameters() if id(w) in inside}
        wrong = [f"{name} is not in this model" for name in weights.keys() - own.keys()]
        wrong += [f"{name} is missing" for name in own.keys() - weights.keys()]
        wrong += [
            f"{name} is {list(weights[name].shape)}, not {list(own[name].shape)}"
            for name in own.keys() & weights.keys()
            if weights[name].shape != own[name].shape
        ]
        if wrong:
            raise ValueError(
                f"adapter: {len(wrong)} weights do not fit the adapters of this run: "
                f"{'; '.join(sorted(wrong)[:3])}; all adapters of a run have the same rank and "
                "layers: give those that one run made, or train each on its own"
            )
        self._copy([weights[name] for name in own], list(own.values()))

    def put(self, member: int) -> None:
        """Let the model have this adapter, as it last was."""
        if member == self._inside or member not in self._kept:
            return
        if self._inside is not None:
            self._take_out()
        self._copy(self._kept[member], self._weights)
        for adapter in self._adapters:
            adapter.scale = self.scales[member]
        self._inside = member

    @torch.no_grad()
    def publish(self, member: int) -> None:
        """Bring an adapter, as it now is in the model, to the copy that is sampled from."""
        rank = self._adapters[0].A.shape[0]
        rows = slice(member * rank, (member + 1) * rank)
        for adapter, target in zip(self._adapters, self._targets, strict=True):
            target.A[rows] = adapter.A
            target.B[:, rows] = adapter.B * (self.scales[member] / target.scale)

    def _side_by_side(self) -> Any:
        """A copy of the model with all adapters in it, and the same base."""
        copied: Any = copy_of_trained(self.model)
        choice = AdapterChoice(
            self.number, self._adapters[0].A.shape[0], device=self._adapters[0].A.device
        )
        self._targets: list[SideBySide] = []
        for layer in adapted_layers(copied).values():
            layer.adapter = SideBySide(layer, self.number, choice=choice)  # type: ignore[assignment]
            self._targets.append(layer.adapter)  # type: ignore[arg-type]
        setattr(copied, _CHOICE, choice)
        return copied

    def _take_out(self) -> None:
        assert self._inside is not None
        self._copy(self._weights, self._kept[self._inside])

    @staticmethod
    @torch.no_grad()
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        torch._foreach_copy_(targets, sources)


def choice_of(model: Any) -> AdapterChoice | None:
    """What says which adapter a row has, of a model with several side by side."""
    found: AdapterChoice | None = getattr(model, _CHOICE, None)
    return found


def owners(prompts: Iterable[Any], *, device: torch.device) -> Tensor:
    """The adapters of :class:`OwnTokens`, as a tensor; 0 of plain tokens."""
    return torch.tensor([getattr(tokens, "adapter", 0) for tokens in prompts], device=device)
