"""A model that is only asked: no gradient, no optimiser, and no more memory than it must take."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.models.adapters import adapted_layers

if TYPE_CHECKING:
    from posttrain.models.load import Policy

# Of a token that only the policy has a row for: e^−100 is 0 in float32, and its log-prob is finite.
NEVER = -100.0


class Frozen:
    """A model kept in its own precision, and away from the device between two questions.

    ``dtype`` casts the weights (not the buffers: rotary frequencies stay exact); None leaves them.
    ``offload`` keeps them in main memory and brings them to the device for each :meth:`on_device`.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | None = None, offload: bool = False
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device
        self._offload = offload and self._device.type != "cpu"
        for weight in model.parameters():
            weight.data = weight.data.to(dtype or weight.dtype)
        self._rest()

    @classmethod
    def copy_of(
        cls, model: nn.Module, *, dtype: torch.dtype | None = None, offload: bool = False
    ) -> Frozen:
        """A frozen copy of the weights as they are now."""
        return cls(copy.deepcopy(model), dtype=dtype, offload=offload)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The model on its device, without gradient."""
        if self._offload:
            self._model.to(self._device)
        try:
            with torch.no_grad():
                yield self._model
        finally:
            self._rest()

    def weights(self) -> dict[str, Tensor]:
        """Its weights by name, where they are now; to be read, or filled in place."""
        return dict(self._model.named_parameters())

    def _rest(self) -> None:
        if self._offload:
            self._model.to("cpu")


class EarlierAdapter(Frozen):
    """A model with its adapters as they were when this was made: a reference without a copy.

    Their numbers are exchanged in place: nothing that holds the weights' addresses has to know.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._earlier = {n: w.detach().clone() for n, w in self._adapters().items()}

    def _adapters(self) -> dict[str, nn.Parameter]:
        return {name: w for name, w in self._model.named_parameters() if ".adapter." in name}

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The model with the earlier adapters, without gradient."""
        self._exchange()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            self._exchange()

    def weights(self) -> dict[str, Tensor]:
        """The earlier adapters by name; to be read, or filled in place."""
        return self._earlier

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._adapters().items():
            now = weight.detach().clone()
            weight.copy_(self._earlier[name])
            self._earlier[name].copy_(now)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """How a reference model is kept: the options of :class:`Frozen`."""

    dtype: torch.dtype | None = None
    offload: bool = False

    def of(self, model: nn.Module) -> Frozen:
        """The weights as they are now: a frozen copy of the model, or of its adapters alone."""
        if adapted_layers(model):
            return EarlierAdapter(model)
        return Frozen.copy_of(model, dtype=self.dtype, offload=self.offload)


def check_teacher(teacher: Policy, policy: Policy) -> None:
    """Raise where teacher and policy mean different things by a token, or by the end of a text."""
    theirs, ours = teacher.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    wrong = [word for word in {**ours, **theirs} if theirs.get(word) != ours.get(word)]
    told = f"teacher.model: {teacher.source!r}"
    if wrong:
        there, here = (known.get(wrong[0], "missing") for known in (theirs, ours))
        raise ValueError(
            f"{told} has another vocabulary than the policy ({len(theirs)} tokens and {len(ours)}; "
            f"{len(wrong)} differ: {wrong[0]!r} is {there} there and {here} here), so it would "
            "score other words than were sampled; take a teacher of the policy's own family"
        )
    if not set(teacher.end_tokens) & set(policy.end_tokens):
        ends = [
            model.tokenizer.convert_ids_to_tokens(list(model.end_tokens))
            for model in (teacher, policy)
        ]
        raise ValueError(
            f"{told} ends its texts with {ends[0]} and the policy with {ends[1]}, so it would "
            "teach never to end; take one that shares an end token (base or instruct, both alike)"
        )


@torch.no_grad()
def fit_rows(model: Any, rows: int) -> None:
    """Give a model so many rows of embedding and head, in place.

    Sizes of one family share a tokenizer and pad these rows to different multiples. Rows beyond
    ``rows`` belong to no token, and are cut off: probabilities add up to 1 over the others. Rows
    that are missing are read as 0, and never emitted.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    known = head.weight.shape[0]
    if known == rows:
        return

    def resized(weight: torch.Tensor) -> nn.Parameter:
        kept = weight[:rows]
        padding = kept.new_zeros(rows - len(kept), *kept.shape[1:])
        return nn.Parameter(torch.cat([kept, padding]), requires_grad=False)

    bias = head.bias
    if rows > known or bias is not None:
        old = head.weight.new_zeros(known) if bias is None else bias
        head.bias = resized(old)
        head.bias[known:] = NEVER
    embedding.weight, head.weight = resized(embedding.weight), resized(head.weight)
    embedding.num_embeddings = head.out_features = rows
    model.config.get_text_config().vocab_size = rows
    if hasattr(model, "vocab_size"):
        model.vocab_size = rows
