"""Which keys make a recipe fit that does not: alone, and the least intrusive of them together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from posttrain.cli.memory_plan import recipe_of
from posttrain.config import Resolved
from posttrain.estimate.options import Search, candidates
from posttrain.estimate.parts import CONTEXT
from posttrain.estimate.work import Work, work_of

GIB = 2**30
SMALL = {"hidden": 1024, "layers": 6, "heads": 8, "intermediate": 4096, "vocabulary": 4000}
DECIDED = ("--model.compile", "false", "--rl.adam_moments", "8bit", "--rl.max_new_tokens", "64")

TRACED: dict[Any, Any] = {}  # what was counted of passes of SMALL: it depends on no memory


def search(
    model: str, memory: float, *overrides: str, shape: Mapping[str, Any] | None = None
) -> Search:
    def ask(recipe: Resolved, *, like: Work | None = None) -> Work:
        found = work_of(recipe, device="cuda", prompt_tokens=64, shape=shape, like=like)
        return replace(found, traced=TRACED) if shape == SMALL else found

    return Search(
        read=lambda more: recipe_of(model, [*overrides, *more]), ask=ask, memory=memory * GIB
    )


def test_each_option_is_computed() -> None:
    asked = search("llama-3.2-1b", 8)
    assert not asked.fit
    options = asked.helpful()
    peaks = [option.found.peak for option in options]
    assert peaks == sorted(peaks)
    assert peaks[-1] < asked.found.peak
    moments = next(option for option in options if option.text == 'rl.adam_moments = "8bit"')
    saved = asked.found.peak - moments.found.peak
    assert saved / 1.2358e9 == pytest.approx(8 - 2 - 8 / 256, rel=0.01)  # bytes of a weight
    assert options[0].keys.items() >= {"adapter.rank": 16}.items()


def test_options_are_combined_where_none_is_enough_alone() -> None:
    """100 million weights in 1 GB: adapters alone take more, and with checkpoints they do not."""
    asked = search("my-own-model", 1.0, *DECIDED, shape=SMALL)
    found = asked.together()
    assert found is not None
    assert dict(found.keys) == {"rl.checkpoint_activations": True, "adapter.rank": 16}
    assert found.found.peak + CONTEXT <= GIB
    for keys in ({"adapter.rank": 16}, {"rl.checkpoint_activations": True}):
        assert not asked.fits([keys])


def test_the_base_is_kept_in_four_bits_where_nothing_less_is_enough() -> None:
    pytest.importorskip("bitsandbytes")
    found = search("my-own-model", 0.8, *DECIDED, shape=SMALL).together()
    assert found is not None
    assert (found.keys["adapter.quantize"], found.keys["adapter.rank"]) == ("nf4", 16)
    assert found.found.peak + CONTEXT <= 0.8 * GIB
    own = search("my-own-model", 0.8, *DECIDED, "--adapter.rank", "4", shape=SMALL)
    assert {"adapter.quantize": "nf4"} in own.allowed


@pytest.mark.parametrize("memory", [0.7, 0.9, 1.0, 2.2])
def test_what_is_found_is_the_first_of_all_combinations(memory: float) -> None:
    """In the order of what they cost: by the most intrusive option of each, then the next."""
    pytest.importorskip("bitsandbytes")
    asked = search("my-own-model", memory, *DECIDED, shape=SMALL)
    options = asked.allowed
    combined = (
        [keys for place, keys in enumerate(options) if number >> place & 1]
        for number in range(1, 2 ** len(options))
    )
    first = next((asked.merged(some) for some in combined if asked.fits(some)), None)
    found = asked.together()
    assert (found and found.keys) == first
    assert (first is None) == (memory == 0.7)


def test_what_fits_a_card_fits_a_larger_one() -> None:
    sizes = [0.7, 0.8, 0.9, 1.0, 1.5, 1.8, 2.0, 2.2, 2.4, 2.9]
    said = [
        (asked := search("my-own-model", size, *DECIDED, shape=SMALL)).fit
        or asked.together() is not None
        for size in sizes
    ]
    assert said == sorted(said)
    assert not said[0]
    assert said[-1]


def test_the_rules_of_recipes_decide_what_goes_together() -> None:
    """vLLM samples beside no base in four bits; adapters need no copy of the reference."""
    asked = search("my-own-model", 1, "--rl.engine", "vllm", shape=SMALL)
    assert not any("adapter.quantize" in keys for keys in asked.allowed)
    assert any(why.startswith("adapter.quantize: vLLM") for why in asked.refused)
    merged = asked.merged([{"rl.kl.offload": True}, {"rl.kl.dtype": "bfloat16"}])
    assert dict(merged) == {"rl.kl.offload": True, "rl.kl.dtype": "bfloat16"}
    merged = asked.merged([{"rl.kl.offload": True}, {"adapter.rank": 16}])
    assert dict(merged) == {"adapter.rank": 16}


def test_what_needs_a_package_is_not_proposed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    asked = search("my-own-model", 0.7, shape=SMALL)
    names = [key for keys in asked.allowed for key in keys]
    assert "adapter.rank" in names
    assert not {"adapter.quantize", "rl.adam_moments"} & set(names)
    moments, base = asked.refused
    assert "posttrain[bitsandbytes]" in moments
    assert "posttrain[qlora]" in base


def test_nothing_is_offered_that_is_so_already() -> None:
    whole = ("--adapter.rank", "8", "--adapter.quantize", "nf4", "--model.dtype", "bfloat16")
    more = ("--rl.checkpoint_activations", "true", "--rl.engine.max_sequences", "16")
    asked = search("my-own-model", 8, *whole, *more, *DECIDED, shape=SMALL)
    assert list(candidates(asked.recipe, asked.work)) == []
    assert asked.fit
