"""What is asked once of a model must not depend on how its weights make rounding grow."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from models.families import FAMILIES, VOCABULARY, trained_like
from transformers.models.llama import modeling_llama

from posttrain.fast.attention import interface as attention
from posttrain.fast.attention.replaceable import replaceable
from posttrain.fast.kv_slots import fits_slots
from posttrain.fast.packed_states import can_be_packed, packs
from posttrain.models.head import logits_are_head_of_states
from posttrain.types.ways import Support

TOKENS = torch.arange(8)[None] % VOCABULARY


def made(family, *, dtype=torch.float32, kind="eager"):
    """A model of the family that is like a trained one."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**settings), attn_implementation=kind
    )
    return trained_like(model, dtype=dtype)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_large_states_do_not_hide_the_fast_ways(family, dtype, kind):
    if family == "gemma2" and kind == "sdpa":
        pytest.skip("transformers computes soft-capped scores by its eager code alone")
    if family == "qwen3_moe" and dtype == torch.bfloat16:
        pytest.skip("PyTorch has no product for experts as narrow as these")
    model = made(family, dtype=dtype, kind=kind)
    # Soft-capped scores are not ours to compute; windows of 4 tokens are too short to be packed.
    ours = family != "gemma2"
    assert bool(replaceable(model)) == ours
    assert logits_are_head_of_states(model, TOKENS)
    assert bool(can_be_packed(model.get_decoder())) == (
        ours and family not in ("gemma3", "mistral")
    )
    assert not ours or fits_slots(model)


def test_rounding_alone_makes_whole_passes_differ():
    """So the models above are a test: Qwen 2.5 in bfloat16 differs by 0.06, as this one does."""
    model = made("qwen2", dtype=torch.bfloat16)
    inputs = {"input_ids": TOKENS, "position_ids": torch.arange(8)[None], "use_cache": False}
    with torch.no_grad():
        expected = model.get_decoder()(**inputs).last_hidden_state
        with attention.attending(model, attention.Causal()):
            found = model.get_decoder()(**inputs).last_hidden_state
    assert float((found - expected).norm() / expected.norm()) > 0.06


@pytest.mark.parametrize(
    "mixed_in",
    [
        pytest.param(lambda states, _: states * 1.001, id="queries scaled"),
        pytest.param(lambda states, module: states + 1e-3 * module.layer_idx, id="in one layer"),
    ],
)
def test_what_a_model_mixes_in_is_found_in_any_layer(mixed_in, monkeypatch):
    own = modeling_llama.eager_attention_forward

    def other(module, query, *arguments, **options):
        return own(module, mixed_in(query, module), *arguments, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    assert not replaceable(made("llama"))


def test_what_is_done_to_logits_is_found_however_large_the_states(monkeypatch):
    """A soft cap hardly changes small logits, and large states would make it look like rounding."""
    model = made("llama")
    own = type(model).forward

    def capped(self, *arguments, **options):
        output = own(self, *arguments, **options)
        output.logits = torch.tanh(output.logits / 300) * 300
        return output

    monkeypatch.setattr(type(model), "forward", capped)
    with pytest.warns(UserWarning, match="not its output head"):
        assert not logits_are_head_of_states(model, TOKENS)


def test_a_token_whose_state_is_zero_hides_nothing():
    model = made("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0  # as padding has it in some models
    assert replaceable(model)
    assert can_be_packed(model.get_decoder())


def test_threads_that_decide_at_the_same_time_do_not_mix():
    """A learner asks of its model while an engine asks of its own."""
    models = [made("llama") for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(replaceable, models))


def test_a_decision_keeps_no_model_alive():
    """It is made by a function that transformers knows, for all models and threads."""
    model = made("llama")
    assert replaceable(model)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_a_verdict_says_why():
    """In words that a user can read: they stand in the line that a run begins with."""
    assert replaceable(made("gemma2")).why_not == "it has attention with soft-capped scores"
    trunk = made("mistral").get_decoder()
    assert can_be_packed(trunk).why_not == "a layer's window is shorter than 12 tokens"
    assert (
        packs(trunk, 24).why_not == "its sliding_window of 4 is shorter than sequences of 24 tokens"
    )
    model = made("llama")
    model.gradient_checkpointing_enable()
    assert "checkpointed" in packs(model.get_decoder(), 24).why_not
    assert packs(made("llama").get_decoder(), 24) == Support()
