"""Whether a model's attention is ours to replace: decided where rounding has no say.

Trained weights amplify rounding. Those of Qwen 2.5 turn float32's 1e-7 into 1e-5 and bfloat16's
into 0.06, so whole passes of two kernels say little about what a model does.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from posttrain.fast.attention.interface import Causal, attending, implementation, replaced_attention
from posttrain.models.head import full_precision
from posttrain.types.ways import Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERDICT = "_posttrain_attention_is_replaceable"
_MASKED, _UNMASKED = "posttrain_masked", "posttrain_unmasked"
_deciding = threading.local()  # transformers knows one function by name, for all threads


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """How far states are from those expected, by how far these are apart from token to token.

    ``‖found − expected‖ / √mean ‖expected − mean expected‖²``: what all tokens have in common, as
    the few large channels of trained models, hides nothing. Shapes: [..., D] → [...].

    >>> expected = torch.tensor([[99.0, 5.0], [99.0, -5.0]])
    >>> relative_errors(expected + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), expected)
    tensor([0.2000, 0.0000], dtype=torch.float64)
    """
    found, expected = found.double(), expected.double()
    apart = (expected - expected.flatten(0, -2).mean(0)).norm(dim=-1).square().mean().sqrt()
    return (found - expected).norm(dim=-1) / apart.clamp_min(torch.finfo(apart.dtype).tiny)


def replaceable(model: PreTrainedModel) -> Verdict:
    """Whether the model gives the same hidden states with attention of ours.

    Decided once, and remembered on the module: a model may mix more into its attention than it
    tells the interface.
    """
    if not hasattr(model, _VERDICT):
        with full_precision(model.device):
            setattr(model, _VERDICT, _decide(model))
    found: Verdict = getattr(model, _VERDICT)
    return found


def _decide(model: Any) -> Verdict:
    """In two passes of the same arithmetic, the second without the masks that ours does without."""
    if not type(model)._supports_attention_backend:
        return Verdict("its code takes no attention but its own")
    config = model.config.get_text_config(decoder=True)
    length = min(12, getattr(config, "max_position_embeddings", None) or 12)
    positions = torch.arange(length, device=model.device).expand(2, length)
    tokens = (positions * 7 + torch.tensor([[0], [5]], device=model.device)) % config.vocab_size
    inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    trunk, layers = model.get_decoder(), _Layers(model)
    _deciding.layers = layers
    try:
        with implementation(model, _MASKED):
            expected = trunk(**inputs).last_hidden_state
        with implementation(model, _UNMASKED):
            found = trunk(**inputs).last_hidden_state
    except NotImplementedError as error:
        return Verdict(f"it has {error}")
    except (TypeError, AttributeError, KeyError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Verdict(f"a pass with attention of ours breaks ({said})")
    finally:
        del _deciding.layers  # it holds the model, and this thread may live long
    # A model that does more with a mask than to attend differs by about 1; of rounding, hardly any.
    if not bool((relative_errors(found, expected) < 0.01).all()):
        return Verdict("it does more with a mask than to attend")
    return layers.agree()


class _Layers:
    """Layers that attend by their model's own plain code, and what ours gives beside it.

    Ours is compared on states of size 1, in float64: their rounding is small whatever the weights.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._masks: dict[int, Tensor | None] = {}
        self._errors: list[float] = []

    def agree(self) -> Verdict:
        """Whether ours is the same in all layers that were seen."""
        if not self._errors:
            return Verdict("none of its layers attends")
        # Some models compute their softmax in float32, whatever they are given.
        if max(self._errors) < 1e-5:
            return Verdict()
        return Verdict(f"its attention is another one (off by {max(self._errors):.1g} of 1)")

    def compare(self, module: Any, *given: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Attend with the mask that is given, last of what is ``given``, and keep it."""
        *states, mask = given
        self._masks[module.layer_idx] = mask
        drawn = torch.Generator().manual_seed(0)
        sized = [
            torch.randn(each.shape, generator=drawn, dtype=torch.float64).to(each.device)
            for each in states
        ]
        expected = _own_code(module)(module, *sized, mask, **options)[0]
        with attending(self._model, Causal()):
            found = replaced_attention(module, *sized, **options)[0]
        self._errors.append(float((found - expected).abs().max()))
        return _own_code(module)(module, *states, mask, **options)

    def repeat(self, module: Any, *states: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The same, with the mask of the pass before."""
        mask = self._masks[module.layer_idx]
        return _own_code(module)(module, *states[:3], mask, **options)


def _own_code(module: Any) -> Any:
    """The attention that the model's own file writes out in plain PyTorch."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]


AttentionInterface.register(
    _MASKED, lambda *states, **options: _deciding.layers.compare(*states, **options)
)
AttentionInterface.register(
    _UNMASKED, lambda *states, **options: _deciding.layers.repeat(*states, **options)
)
AttentionMaskInterface.register(_MASKED, eager_mask)
