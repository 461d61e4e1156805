"""Continuous batching in slots: what a sequence says is what it says alone, whoever sits beside."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.families import build
from rollout.cases import END, drawn, largest_error, ragged, spell
from slow_cases import slow_but

from posttrain.fast import scheduler, slot_decoder
from posttrain.fast.cast_copy import CastCopy
from posttrain.fast.kv_slots import Capacity, bytes_per_slot
from posttrain.fast.scheduler import Scheduler
from posttrain.fast.slot_decoder import SlotDecoder
from posttrain.models import gpu_memory
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Prompt, Sampling

FAMILIES = [
    "llama",
    "llama tied",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3",
    "mistral",
    "mixtral",
    "gpt2",
]
PROMPTS = ragged(4, 9, 1, 9, 30, 2)
ENDS = (END, 7, 11)
HOT = Sampling(max_new_tokens=20, temperature=1.5)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few sequences already see steps of several sizes, and many looks."""
    monkeypatch.setattr(scheduler, "SMALLEST", 2)
    monkeypatch.setattr(slot_decoder, "LOOK_EVERY", 3)


def engine(model: Any, **options: Any) -> NativeEngine:
    given = {"end_tokens": ENDS, "decode": spell, "slots": True, **options}
    return NativeEngine(model, **given)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "gemma3", "mixtral"))
@pytest.mark.parametrize(
    "sampling",
    [
        HOT,
        Sampling(max_new_tokens=12, temperature=0.0),
        Sampling(max_new_tokens=12, temperature=0.6, top_k=9, top_p=0.9),
    ],
    ids=["hot", "greedy", "filtered"],
)
def test_the_same_as_in_parts(family: str, sampling: Sampling) -> None:
    """Any number of slots: the tokens of the plain engine, and the model's own log-probs."""
    model = build(family)
    expected = engine(model, slots=False).generate(PROMPTS, sampling, num_samples=5, seed=3)
    for most in (None, 1, 7):
        answers = engine(model, max_sequences=most).generate(
            PROMPTS, sampling, num_samples=5, seed=3
        )
        assert drawn(answers) == drawn(expected)
        assert largest_error(model, PROMPTS, answers=answers, sampling=sampling) < 1e-9
        reasons = [[c.stop_reason for c in group] for group in answers]
        assert reasons == [[c.stop_reason for c in group] for group in expected]


class Rows:
    """How many rows each forward pass of the decoder had."""

    def __init__(self, model: Any) -> None:
        self.read: list[tuple[int, int]] = []
        model.get_decoder().register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        self.read.append(tuple(inputs["input_ids"].shape))


def test_ended_slots_are_refilled_and_short_sequences_do_not_wait_for_long_ones() -> None:
    """The work is near the number of tokens drawn, not sequences × the longest."""
    model, sampling = build("llama"), Sampling(max_new_tokens=30, temperature=1.5)
    one = engine(model, max_sequences=8)
    one.generate(PROMPTS, sampling, num_samples=1, seed=0)
    watch = Rows(model)
    answers = one.generate(PROMPTS, sampling, num_samples=16, seed=0)
    lengths = [len(c.tokens) for group in answers for c in group]
    work = sum(rows for rows, width in watch.read if width == 1)
    assert max(rows for rows, width in watch.read if width == 1) <= 8
    assert max(lengths) == 30
    # A look every 3 steps and free slots that wait for company: at most 3 more for each sequence.
    assert work <= sum(lengths) + 3 * len(lengths)
    assert work < 0.5 * len(lengths) * max(lengths)


def test_slots_fit_into_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for more waits for a free slot; no request is too large."""
    model, sampling = build("llama"), Sampling(max_new_tokens=8)
    whole = engine(model).generate(PROMPTS, sampling, num_samples=6, seed=0)
    each = bytes_per_slot(model, 30 + 8, dtype=torch.float64)
    monkeypatch.setattr(gpu_memory, "CPU_BYTES", 5 * each + 1)
    one = engine(model)
    assert drawn(one.generate(PROMPTS, sampling, num_samples=6, seed=0)) == drawn(whole)
    assert one._decoder.slots is not None
    assert one._decoder.slots.capacity.num_slots == 5
    one.generate(PROMPTS, sampling, num_samples=60, seed=0)
    assert one._decoder.slots.capacity.num_slots == 5


def test_each_prompt_is_read_once_however_few_the_slots() -> None:
    model = build("llama")
    one = engine(model, max_sequences=4)
    one.generate(PROMPTS[:1], HOT, num_samples=1, seed=0)
    watch = Rows(model)
    one.generate(PROMPTS, HOT, num_samples=9, seed=0)
    prompts = [shape for shape in watch.read if shape not in {(n, 1) for n in range(1, 5)}]
    lengths = sorted(width for _, width in prompts)
    assert sum(rows for rows, _ in prompts) + watch.read.count((1, 1)) >= len(PROMPTS)
    assert lengths[-1] == 30
    assert sum(rows for rows, width in prompts if width == 30) == 1


@pytest.mark.usefixtures("float64_throughout")
def test_memory_is_kept_between_calls_and_new_weights_are_seen() -> None:
    model = build("llama")
    one = engine(model)
    one.generate(PROMPTS, HOT, num_samples=4, seed=0)
    decoder = one._decoder.slots
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    short = Sampling(max_new_tokens=6)
    answers = one.generate(PROMPTS[:3], short, num_samples=2, seed=5)
    assert one._decoder.slots is decoder  # it all fits
    assert largest_error(model, PROMPTS[:3], answers=answers, sampling=short) < 1e-9
    long = Sampling(max_new_tokens=28)
    answers = one.generate(PROMPTS, long, num_samples=4, seed=5)
    assert one._decoder.slots is not decoder
    assert largest_error(model, PROMPTS, answers=answers, sampling=long) < 1e-9


def test_nan_weights_are_reported() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[:] = torch.nan
    model._posttrain_logits_are_head_of_states = True  # NaN equals nothing, itself included
    with pytest.raises(ValueError, match="the model gave NaN or infinity"):
        engine(model).generate(PROMPTS, HOT, num_samples=2, seed=0)


@pytest.mark.filterwarnings("ignore:Llama4ForCausalLM. its logits are not its output head")
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gemma4", "llama4"])
def test_a_model_with_other_attention_goes_the_plain_way(family: str) -> None:
    """Soft-capped scores, compressed keys, heads of two sizes, a decoder that is the whole."""
    model = build(family, dtype=torch.float32)
    one = engine(model)
    answers = one.generate(PROMPTS, HOT, num_samples=2, seed=0)
    assert one._decoder.slots is None
    assert largest_error(model, PROMPTS, answers=answers, sampling=HOT) < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen2", "qwen3", "gpt2", "gemma3"])
def test_a_half_copy_computes_what_autocast_does(family: str) -> None:
    """Bit for bit, also after the weights have moved; and nothing but matrices is copied."""
    model = build(family, dtype=torch.float32)
    half = CastCopy(model, torch.bfloat16)
    tokens = torch.arange(18).reshape(2, 9)
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(input_ids=tokens, use_cache=False).logits
            assert torch.equal(half.model(input_ids=tokens, use_cache=False).logits, expected)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.25)
        half.refresh()
    copied = dict(half.model.named_parameters())
    shared = [name for name, own in model.named_parameters() if copied.get(name) is own]
    assert any("norm" in name or "ln_" in name for name in shared)
    assert any("embed" in name or "wte" in name for name in shared)


def test_steps_that_may_be_captured_keep_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture outlives the scope in which autocast would have kept them."""
    seen = []
    step = SlotDecoder._step

    def watched(self: SlotDecoder, *args: Any, **options: Any) -> None:
        seen.append(torch.is_autocast_cache_enabled())
        step(self, *args, **options)

    monkeypatch.setattr(SlotDecoder, "_step", watched)
    model = build("qwen2", dtype=torch.float32)
    engine(model, compute=torch.bfloat16).generate(PROMPTS, HOT, num_samples=2, seed=0)
    assert seen
    assert not any(seen)


def test_a_larger_batch_does_not_wait_for_the_memory_of_a_smaller_one() -> None:
    one = engine(build("llama"))
    one.generate(PROMPTS, HOT, num_samples=1, seed=0)
    small = one._decoder.slots
    assert small is not None
    small._pool = SimpleNamespace()
    small._steps[1, HOT] = small._to_capture(torch.arange(1), HOT)  # as on a GPU
    there = weakref.ref(small)
    gc.disable()
    try:
        del small
        one.generate(PROMPTS, HOT, num_samples=9, seed=0)
        assert there() is None
        large = weakref.ref(one._decoder.slots)
        del one
        assert large() is None
    finally:
        gc.enable()


def test_equal_prompts_need_not_follow_each_other() -> None:
    model = build("llama")
    prompts = [Prompt(id=str(n), text="", tokens=(n % 4 + 1, 5, 6)) for n in range(8)]
    expected, found = (
        engine(model, max_sequences=most).generate(prompts, HOT, num_samples=2, seed=0)
        for most in (None, 2)
    )
    assert drawn(found) == drawn(expected)


def test_an_engine_recovers_from_weights_that_were_no_numbers() -> None:
    model = build("llama")
    one = engine(model)
    expected = one.generate(PROMPTS, HOT, num_samples=2, seed=0)
    weight = model.get_decoder().layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="the model gave NaN or infinity"):
            one.generate(PROMPTS, HOT, num_samples=2, seed=0)
        weight.copy_(kept)
    assert drawn(one.generate(PROMPTS, HOT, num_samples=2, seed=0)) == drawn(expected)


def test_slots_under_autocast_say_what_the_parts_say() -> None:
    model = build("llama", dtype=torch.float32)
    given = {"compute": torch.bfloat16}
    expected = engine(model, slots=False, **given).generate(PROMPTS, HOT, num_samples=6, seed=0)
    answers = engine(model, **given).generate(PROMPTS, HOT, num_samples=6, seed=0)
    pairs = [
        (one, two)
        for mine, theirs in zip(answers, expected, strict=True)
        for one, two in zip(mine, theirs, strict=True)
    ]
    same = [(one, two) for one, two in pairs if one.tokens == two.tokens]
    assert len(same) > 0.6 * len(pairs)  # rounding flips a draw now and then
    errors = [
        abs(a - b) for one, two in same for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]
    assert sum(errors) / len(errors) < 0.02


def test_the_scheduler_admits_in_order_and_keeps_a_prompt_until_no_one_needs_it() -> None:
    prompts = {n: (n // 2,) for n in range(6)}  # three prompts of two sequences each
    table = Scheduler(prompts, Capacity(num_prompts=2, prompt_tokens=1, num_slots=3, new_tokens=4))
    sequences = table.admit(4)
    assert [(s.number, s.slot, s.index, s.first) for s in sequences] == [
        (0, 0, 0, True),
        (1, 1, 0, False),
        (2, 2, 1, True),
    ]
    assert table.admit(4) == []
    table.advance(2)
    assert table.most_left == 1
    assert [s.number for s in table.release([True, False, False])] == [0]
    (sequence,) = table.admit(4)  # the second of prompt 1: already there
    assert (sequence.number, sequence.slot, sequence.index, sequence.first) == (3, 0, 1, False)
    assert table.most_left == 3
    assert [s.number for s in table.release([False, True, True])] == [1, 2]
    indices = [(s.number, s.index, s.first) for s in table.admit(4)]
    assert indices == [(4, 0, True), (5, 0, False)]  # the index of prompt 0 is free again
