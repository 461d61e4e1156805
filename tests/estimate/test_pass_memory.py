"""What passes keep in memory: counted without numbers, beside what autograd really saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from posttrain.fast.activations import checkpoint_activations
from posttrain.fast.attention.gather_kv import KeyLayout
from posttrain.fast.attention.gathered import Gathered, GatheredPrompts
from posttrain.fast.attention.interface import attending, keep_out_of_compilation
from posttrain.fast.pass_memory import PassMemory, _Sizes, id_of, pass_memory, scoring_bytes
from posttrain.fast.token_scores import token_scores
from posttrain.models.adapters import AdapterSettings, add_adapters, round_base
from posttrain.models.outline import SHAPES, find_config, outline, shape_config

SMALL = {
    "hidden": 96,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "intermediate": 208,
    "vocabulary": 50,
}
BF16 = torch.bfloat16


def maker(config: Any, *, rank: int = 0, checkpointed: bool = False) -> Callable[..., Any]:
    def make(layers: int | None = None) -> Any:
        model = outline(config, layers=layers)
        if rank:
            add_adapters(model, AdapterSettings(rank=rank), seed=0)
            round_base(model, BF16)
        checkpoint_activations(model, enabled=checkpointed)
        return model

    return make


def saved_bytes(model: Any, tokens: int, *, compute: torch.dtype, own: bool = False) -> int:
    """Bytes of all that autograd saves in a forward pass, but for weights; ``own`` attention."""
    trunk, found = model.get_decoder(), {}
    weights = {id_of(weight) for weight in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id_of(tensor) not in weights:
            found[id_of(tensor)] = tensor.untyped_storage()  # kept, so that no address comes twice
        return tensor

    row = torch.zeros(1, tokens, dtype=torch.long)
    at = torch.arange(tokens, dtype=torch.int32)
    layout = KeyLayout(at=at, order=at, begins=torch.zeros(tokens + 1, dtype=torch.int32))
    given = {"input_ids": row, "attention_mask": torch.ones_like(row), "use_cache": False}
    half = torch.autocast("cpu", BF16, compute == BF16, cache_enabled=False)
    with half, saved_tensors_hooks(keep, lambda tensor: tensor):
        if own:
            trunk(**given)
        else:
            with attending(trunk, GatheredPrompts(Gathered(kernel=_Sizes(), layout=layout))):
                trunk(**given, position_ids=row)
    return sum(storage.nbytes() for storage in found.values())


def counted(config: Any, *, compute: torch.dtype, device: str, **options: Any) -> PassMemory:
    compiled = options.pop("compiled", False)
    layers = config.num_hidden_layers
    make = maker(config, **options)
    return pass_memory(make, layers, compute=compute, device=device, compiled=compiled)


TWO_LAYERS = {**SHAPES["smollm2-135m"], "layers": 2}


@pytest.mark.parametrize(
    ("config", "rank", "device", "error"),
    [
        (find_config("tiny"), 0, "cuda", 1e-3),
        (find_config("tiny"), 0, "cpu", 1e-3),
        (shape_config(**TWO_LAYERS), 0, "cuda", 1e-3),
        (shape_config(**TWO_LAYERS), 4, "cuda", 1e-3),
        # Rows that are not packed have one key for several heads.
        (shape_config(**TWO_LAYERS), 0, "cpu", 0.1),
    ],
)
def test_what_is_counted_is_what_autograd_saves(
    config: Any, rank: int, device: str, error: float
) -> None:
    """But for the states of the last layer, which are no saved tensor, and are counted too."""
    compute, tokens = BF16 if device == "cuda" else torch.float32, 64
    found = counted(config, compute=compute, device=device, rank=rank).kept(tokens)
    model = maker(config, rank=rank)()
    saved = saved_bytes(model, tokens, compute=compute, own=device == "cpu")
    assert found - 4 * tokens * config.hidden_size == pytest.approx(saved, rel=error)


def test_the_formula_of_a_layer() -> None:
    """The docstring's formula, by hand for 96 wide layers: see the module."""
    config = shape_config(**SMALL, family="qwen2")
    d, i, h, size = 96, 208, 6, 16
    attention = 4 * (h + 2) * size + 4 * h + 8
    more = counted(
        shape_config(**{**SMALL, "layers": 5}, family="qwen2"), compute=BF16, device="cuda"
    )
    less = counted(config, compute=BF16, device="cuda")
    assert (more.kept.each - less.kept.each) / 2 == 26 * d + 8 * i + attention
    wide = counted(config, compute=BF16, device="cuda", compiled=True)
    assert less.kept.each - wide.kept.each == 3 * (16 * d + 2 * i)
    matrices = d * (2 * h * size + 2 * 2 * size) + 3 * d * i
    assert less.kept.fixed == pytest.approx(3 * 2 * matrices, rel=1e-3)  # cast for the pass


def test_a_checkpointed_layer_keeps_its_input() -> None:
    config = shape_config(**SMALL)
    less = counted(config, compute=BF16, device="cuda", checkpointed=True)
    more = counted(
        shape_config(**{**SMALL, "layers": 5}), compute=BF16, device="cuda", checkpointed=True
    )
    assert (more.kept.each - less.kept.each) / 2 == 4 * 96
    whole = counted(config, compute=BF16, device="cuda")
    assert less.kept(4096) < whole.kept(4096) / 6
    assert less.passing.each > whole.passing.each  # a layer's own activations, made again


@pytest.mark.slow  # a compiler runs
@pytest.mark.parametrize(
    ("family", "rank"), [("llama", 0), ("llama", 4), ("qwen2", 0), ("qwen3", 0)]
)
def test_the_formula_of_a_compiled_layer_is_what_a_compiler_keeps(family: str, rank: int) -> None:
    """PyTorch's own partition of forward and backward, without the code that it would generate."""
    keep_out_of_compilation()
    made = {}
    for layers in (2, 3):
        config = shape_config(**{**SMALL, "layers": layers}, family=family, head_size=16)
        model = maker(config, rank=rank)()
        for layer in model.get_decoder().layers:
            layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
        each = [saved_bytes(model, tokens, compute=BF16) for tokens in (64, 128)]
        made[layers] = (each[1] - each[0]) / 64
        torch.compiler.reset()
    shapes = [shape_config(**{**SMALL, "layers": n}, family=family, head_size=16) for n in (3, 4)]
    less, more = (
        counted(config, compute=BF16, device="cuda", compiled=True, rank=rank) for config in shapes
    )
    assert more.kept.each - less.kept.each == pytest.approx(made[3] - made[2], rel=0.03)


def test_the_bytes_of_scoring_are_those_that_the_profiler_sees() -> None:
    """Two buffers of a chunk, the gradient of the head, states and their gradient."""
    from torch.profiler import ProfilerActivity, profile

    rows, width, vocabulary = 512, 64, 49_152
    states = torch.randn(rows, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        tokens = torch.arange(rows)
        token_scores(states, tokens, weight=head)[0].sum().backward()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    given = {"head": head, "compute": torch.float32, "device": "cpu", "memory": 0.0}
    assert scoring_bytes(rows, gradient=True, **given) == pytest.approx(most, rel=0.1)
    assert scoring_bytes(rows, gradient=False, **given) < 0.6 * most


def test_attention_that_cannot_be_counted_is_named() -> None:
    config = shape_config(**SMALL, head_size=16, family="gemma2")
    with pytest.raises(ValueError, match="model: attention with soft-capped scores is not counted"):
        pass_memory(maker(config), 3, compute=BF16, device="cuda")


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_with_few_layers_is_outlined_with_more(family: str, layers: int) -> None:
    """More layers are traced than it has; their kinds go on in turn."""
    config = shape_config(**{**SMALL, "layers": layers}, head_size=16, family=family)
    model = outline(config, layers=3)
    assert len(model.get_decoder().layers) == 3
    assert model.config.layer_types == (config.layer_types * 3)[:3]


def test_a_plan_of_two_layers_says_what_is_not_counted(tmp_path: Path) -> None:
    shape_config(**{**SMALL, "layers": 2}, head_size=16, family="gemma2").save_pretrained(tmp_path)
    config = find_config(str(tmp_path))
    with pytest.raises(ValueError, match="model: attention with soft-capped scores is not counted"):
        pass_memory(maker(config), 2, compute=BF16, device="cpu")
