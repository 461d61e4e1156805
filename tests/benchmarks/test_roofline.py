"""The counting behind the share of the roofline, against numbers derived by hand."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.models.tiny import build_tiny

FILE = Path(__file__).parents[2] / "benchmarks" / "roofline.py"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "roofline", module)  # where dataclasses look for types
    spec.loader.exec_module(module)
    return module


SHAPE = {
    "weights": 1000,
    "vocabulary": 50,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "key_heads": 2,
    "head_size": 8,
}


def test_every_term_of_a_step(roofline: ModuleType) -> None:
    step = roofline.decode_step(roofline.Shape(**SHAPE), rows=3, length=10, item_bytes=2)
    assert step.weight_bytes == 2000  # 1000 · 2, however many rows
    assert step.key_bytes == 3840  # keys and values: 2 · 2 layers · 2 heads · 8 · 10 · 3 rows · 2
    assert step.logit_bytes == 600  # written and read: 2 · 50 · 3 rows · 2
    assert step.matrix_flops == 6000  # 2 · 1000 · 3 rows
    assert step.attention_flops == 7680  # 2 products · 2 · 2 layers · 4 heads · 8 · 10 · 3 rows
    assert (step.bytes, step.flops) == (6440, 13680)


def test_the_roofline_is_the_slower_of_moving_and_computing(roofline: ModuleType) -> None:
    step = roofline.decode_step(roofline.Shape(**SHAPE), rows=3, length=10, item_bytes=2)
    slow_memory = roofline.Peak(bytes_per_second=1000.0, flops_per_second=1e4, source="")
    assert step.seconds(slow_memory) == pytest.approx(6.44)
    slow_units = roofline.Peak(bytes_per_second=1000.0, flops_per_second=1e3, source="")
    assert step.seconds(slow_units) == pytest.approx(13.68)


def test_averages_do_as_much_work_as_the_steps_one_by_one(roofline: ModuleType) -> None:
    prompts, lengths = [4, 7, 2], [1, 3, 5]
    shape = roofline.Shape(**SHAPE)
    work = roofline.average(prompts, lengths)
    # Step by step: who is still running, and how much each looks back at.
    running = [[p + t for p, n in zip(prompts, lengths, strict=True) if t < n] for t in range(5)]
    one_by_one = [
        roofline.decode_step(shape, rows=len(seen), length=sum(seen) / len(seen), item_bytes=2)
        for seen in running
    ]
    mean = roofline.decode_step(shape, rows=work.rows, length=work.length, item_bytes=2)
    assert (work.steps, work.rows) == (5, 9 / 5)
    assert work.length == pytest.approx((4 + 7 + 8 + 9 + 2 + 3 + 4 + 5 + 6) / 9)
    assert work.steps * mean.bytes == pytest.approx(sum(step.bytes for step in one_by_one))
    assert work.steps * mean.flops == pytest.approx(sum(step.flops for step in one_by_one))


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_that_a_step_reads(roofline: ModuleType, tied: bool) -> None:
    model, tokenizer = build_tiny(hidden_size=16, num_layers=1, num_heads=2, tie_embeddings=tied)
    # Attention 4 · 16², feed-forward 3 · 16 · 64, three norms of 16, and the head; no embedding.
    expected = 1024 + 3072 + 48 + 16 * len(tokenizer)
    shape = roofline.Shape.of(model)
    assert shape.weights == expected
    assert (shape.layers, shape.heads, shape.key_heads, shape.head_size) == (1, 2, 2, 8)
    assert shape.vocabulary == len(tokenizer)
