"""Whether a model's attention can be replaced by ours, decided so that rounding does not matter.

Trained weights amplify rounding. Those of Qwen 2.5 turn float32's 1e-7 into 1e-5 and bfloat16's
into 0.06, so comparing whole passes of two kernels says little about what a model does.
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
from posttrain.types.ways import Support, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERDICT = "_posttrain_attention_is_replaceable"
_MASKED, _UNMASKED = "posttrain_masked", "posttrain_unmasked"
_deciding = threading.local()  # transformers calls the same function in all threads


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """How far states are from those expected, relative to how these differ from token to token.

    ``‖found − expected‖ / √mean ‖expected − mean expected‖²``: what all tokens have in common (a
    few large channels, in trained models) hides no error. Shapes: [..., D] → [...].

    >>> expected = torch.tensor([[99.0, 5.0], [99.0, -5.0]])
    >>> relative_errors(expected + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), expected)
    tensor([0.2000, 0.0000], dtype=torch.float64)
    """
    found, expected = found.double(), expected.double()
    apart = (expected - expected.flatten(0, -2).mean(0)).norm(dim=-1).square().mean().sqrt()
    return (found - expected).norm(dim=-1) / apart.clamp_min(torch.finfo(apart.dtype).tiny)


@remembered(_VERDICT)
def replaceable(model: PreTrainedModel) -> Support:
    """Whether the model gives the same hidden states with attention of ours.

    A model may mix more into its attention than it tells the interface.
    """
    with full_precision(model.device):
        return _decide(model)


def _decide(model: Any) -> Support:
    """By two passes of the same arithmetic; the second gives the model no masks, as ours does."""
    if not type(model)._supports_attention_backend:
        return Support("its code takes no attention but its own")
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
        return Support(f"it has {error}")
    except (TypeError, AttributeError, KeyError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Support(f"a pass with attention of ours breaks ({said})")
    finally:
        del _deciding.layers  # else this thread would keep the model in memory
    # A model that uses masks for more than attention differs by about 1; rounding is far below.
    if not bool((relative_errors(found, expected) < 0.01).all()):
        return Support("it does more with a mask than to attend")
    return layers.agree()


class _Layers:
    """Layers that attend by their model's own plain code, compared with our attention.

    Ours is compared on states of size 1, in float64: their rounding is small whatever the weights.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._masks: dict[int, Tensor | None] = {}
        self._errors: list[float] = []

    def agree(self) -> Support:
        """Whether ours is the same in all layers that were seen."""
        if not self._errors:
            return Support("none of its layers attends")
        # Not 1e-12: some models compute their softmax in float32, whatever the input.
        if max(self._errors) < 1e-5:
            return Support()
        return Support(f"its attention is another one (off by {max(self._errors):.1g} of 1)")

    def compare(self, module: Any, *given: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Attend with the mask, the last of ``given``, and keep it; compare ours."""
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
