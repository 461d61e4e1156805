"""Which way each family samples and learns: declared, taken, and told on its page."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import ways_page
from models.families import batch, build
from torch import Tensor

from posttrain.fast import packed_states as states
from posttrain.fast.compiled import is_compiled
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Prompt, Sampling

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """The rows of the table, by family, as each test below makes them."""
    return {}


@pytest.mark.parametrize("family", ways_page.TABLE)
def test_the_way_that_is_declared_is_taken(
    family: str, monkeypatch: pytest.MonkeyPatch, rows: dict[str, str]
) -> None:
    """And what is not the best way has its reason, and says what it costs."""
    engine, learner = ways_page.parts(family)
    samples, learns = engine.way(), learner.way(ways_page.LONGEST)
    rows[family] = ways_page.row(family, samples, learns)
    engine.generate(
        [Prompt(id="0", text="", tokens=(1, 2))], Sampling(max_new_tokens=2), num_samples=2, seed=0
    )
    slots = engine._decoder.slots if isinstance(engine, NativeEngine) else None
    assert (slots is not None) == ("continuous batching" in samples.uses)
    packed, own = [], states.packed_states

    def seen(*given: Any, **options: Any) -> Tensor:
        packed.append(given)
        return own(*given, **options)

    monkeypatch.setattr(states, "packed_states", seen)
    learner.infer(batch(lengths=(ways_page.LONGEST, 4, 4), width=ways_page.LONGEST))
    assert bool(packed) == ("shared prompts" in learns.uses)
    for way, best in ((samples, "continuous batching"), (learns, "shared prompts")):
        assert (best in way.uses) == (not way.without)
        assert all(missing.why and missing.cost for missing in way.fell_back)


def test_the_page_is_in_step(rows: dict[str, str]) -> None:
    missing = [family for family in ways_page.TABLE if family not in rows]
    for family in missing:  # of a test that ran alone
        engine, learner = ways_page.parts(family)
        rows[family] = ways_page.row(family, engine.way(), learner.way(ways_page.LONGEST))
    table = "\n".join([*ways_page.HEAD, *(rows[family] for family in ways_page.TABLE)])
    assert table in PAGE.read_text(encoding="utf-8"), "run tests/models/ways_page.py"


def test_large_channels_do_not_hide_what_crosses_sequences() -> None:
    """A convolution reads the tokens before, of whichever sequence: its states change by half."""
    _, learner = ways_page.parts("lfm2")
    trunk = learner.model.get_decoder()
    assert "would cross sequences" in states.can_be_packed(trunk).why_not


def test_compiled_layers_are_not_compiled_for_caches_that_grow() -> None:
    """PyTorch would give up on them after a few shapes, and the learner would go without."""
    model = build("llama", dtype=torch.float32)
    for layer in model.get_decoder().layers:
        layer.compile(backend="eager", dynamic=True)
    assert is_compiled(model)
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    prompts = [Prompt(id="0", text="", tokens=(1, 2))]
    engine = NativeEngine(model, end_tokens=[3], decode=str, slots=False)
    engine.generate(prompts, Sampling(max_new_tokens=9), num_samples=2, seed=0)
    assert not frames
