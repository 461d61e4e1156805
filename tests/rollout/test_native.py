"""How the native engine saves work without slots, and that no saving can be seen in what it says.

That is the way of models whose attention is not ours to replace; any model can go it.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from models.families import build
from rollout.cases import END, drawn, largest_error, ragged, spell

from posttrain.fast.score import score_tokens
from posttrain.models import gpu_memory
from posttrain.models.load import Policy
from posttrain.rollout.engines import ENGINES, NativeEngine, TransformersEngine, local, native
from posttrain.types import Batch, Prompt, Sampling

PROMPTS = ragged(4, 9, 1, 9)


class Watched:
    """A model whose every forward pass leaves its batch shape, and whether it had a mask."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.masked: list[bool] = []
        model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        self.shapes.append(tuple(inputs["input_ids"].shape))
        self.masked.append(inputs.get("attention_mask") is not None)


def engine(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, **{"end_tokens": (END,), "decode": spell, "slots": False, **options})


def test_a_distinct_prompt_is_read_once() -> None:
    model = build("llama")
    sampling = Sampling(max_new_tokens=3)
    expected = engine(model).generate([*PROMPTS, PROMPTS[1]], sampling, num_samples=5, seed=0)
    watched = Watched(model)
    answers = engine(model).generate([*PROMPTS, PROMPTS[1]], sampling, num_samples=5, seed=0)
    assert watched.shapes[0] == (4, 9)
    assert watched.shapes[1:] == [(25, 1), (25, 1)]
    assert answers == expected
    assert drawn(answers)[1] != drawn(answers)[4]  # the same prompt, and draws of its own


@pytest.mark.usefixtures("float64_throughout")
def test_finished_sequences_leave_the_batch_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sampling = build("llama"), Sampling(max_new_tokens=30, temperature=1.5)
    ends = (END, 7, 11, 19)
    results = {}
    for every, share in ((1, 1.0), (4, 0.75), (3, 0.5), (1000, 0.0)):
        monkeypatch.setattr(native, "CHECK_EVERY", every)
        monkeypatch.setattr(native, "SHRINK_AT", share)
        one = engine(model, end_tokens=ends)
        results[every, share] = one.generate(PROMPTS, sampling, num_samples=6, seed=1)
    first, *others = map(drawn, results.values())
    assert others == [first] * 3
    lengths = {len(tokens) for group in first for tokens in group}
    assert len(lengths) > 5  # they do end at different times
    for answers in results.values():
        assert largest_error(model, PROMPTS, answers=answers, sampling=sampling) < 1e-9


def test_the_batch_shrinks_and_stops_when_all_have_ended() -> None:
    model = build("llama")
    sampling = Sampling(max_new_tokens=50, temperature=1.5)
    one = engine(model, end_tokens=(END, 7, 11, 19))
    one.generate(PROMPTS, sampling, num_samples=6, seed=1)
    watched = Watched(model)
    answers = one.generate(PROMPTS, sampling, num_samples=6, seed=1)
    rows = [batch for batch, _ in watched.shapes[1:]]
    longest = max(len(tokens) for group in drawn(answers) for tokens in group)
    assert rows[0] == 24
    assert rows[-1] < 8
    assert sorted(rows, reverse=True) == rows
    assert longest <= len(rows) + 1 < longest + native.CHECK_EVERY < 50


def test_prompts_of_one_length_need_no_mask() -> None:
    model = build("llama")
    one, sampling = engine(model), Sampling(max_new_tokens=4)
    one.generate(ragged(5), sampling, num_samples=1, seed=0)
    watched = Watched(model)
    one.generate(ragged(6, 6, 6), sampling, num_samples=2, seed=0)
    assert not any(watched.masked)
    one.generate(ragged(6, 5, 6), sampling, num_samples=2, seed=0)
    assert watched.masked[-1]


def test_parts_hold_as_many_sequences_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = build("llama"), Sampling(max_new_tokens=8)
    whole = engine(model).generate(PROMPTS, sampling, num_samples=6, seed=0)
    each = local.bytes_per_sequence(model, prompt_tokens=9, new_tokens=8, dtype=torch.float64)
    monkeypatch.setattr(gpu_memory, "CPU_BYTES", 5 * each + 1)
    watched = Watched(model)
    parts = engine(model).generate(PROMPTS, sampling, num_samples=6, seed=0)
    assert max(batch for batch, _ in watched.shapes) == 5
    assert drawn(parts) == drawn(whole)
    with pytest.raises(ValueError, match="max_sequences: must be at least 1, got 0"):
        engine(model, max_sequences=0)


def test_half_precision_is_the_learners() -> None:
    """Under autocast too the engine's log-probs are those the learner computes."""
    model = build("llama", dtype=torch.float32)
    sampling = Sampling(max_new_tokens=12, temperature=0.9)
    one = engine(model, compute=torch.bfloat16)
    answers = one.generate(PROMPTS, sampling, num_samples=3, seed=0)
    full = engine(model).generate(PROMPTS, sampling, num_samples=3, seed=0)
    errors = []
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*prompt.tokens, *completion.tokens]])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt.tokens)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                scores = score_tokens(model, Batch(tokens=tokens, mask=mask), temperature=0.9)
            errors.append(scores.logprobs[mask] - torch.tensor(completion.logprobs))
    error = torch.cat(errors).abs()
    assert error.mean() < 0.02
    assert error.max() < 0.3
    assert answers[0][0].logprobs[0] != full[0][0].logprobs[0]  # it did compute in bfloat16


SIZES = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.5}
REFUSED = {
    "counts positions itself": transformers.BloomConfig(**SIZES, n_head=2),
    "keeps no keys and values": transformers.MambaConfig(**SIZES, state_size=4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_native_refuses_the_fallback_takes(reason: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(REFUSED[reason]).eval()
    with pytest.raises(ValueError, match=r"For.*LM: it has .*, and the native engine knows"):
        engine(model)
    policy = Policy(model=model, tokenizer=None, source="a test", end_tokens=(END,), pad_token=END)
    with pytest.warns(UserWarning, match=r"it has .*; sampling with transformers' generate"):
        fallback = ENGINES["native"](policy, spell)
    assert isinstance(fallback, TransformersEngine)
    sampling = Sampling(max_new_tokens=6)
    answers = fallback.generate(PROMPTS, sampling, num_samples=2, seed=0)
    assert largest_error(model, PROMPTS, answers=answers, sampling=sampling) < 1e-4


def test_prompt_columns_and_text_are_not_read() -> None:
    one, sampling = engine(build("llama")), Sampling(max_new_tokens=4)
    bare = [Prompt(id=str(row), text="", tokens=p.tokens) for row, p in enumerate(PROMPTS)]
    asked = (one.generate(prompts, sampling, num_samples=2, seed=0) for prompts in (bare, PROMPTS))
    first, second = ([[r.turns for r in group] for group in answers] for answers in asked)
    assert first == second


def test_a_small_model_is_sampled_by_one_thread_and_a_larger_one_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It follows from the weights alone; afterwards, also of an error, all threads are back."""
    model, seen = build("llama"), []

    def spell_and_note(tokens: Sequence[int]) -> str:
        seen.append(torch.get_num_threads())
        return spell(tokens)

    small = engine(model, decode=spell_and_note)
    sampling, before = Sampling(max_new_tokens=2), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        small.generate(PROMPTS[:1], sampling, num_samples=1, seed=0)
        sizes = [weight.numel() for weight in model.parameters() if weight.ndim == 2]
        average = sum(sizes) / len(sizes)
        monkeypatch.setattr(local, "SHARED", average)
        small.generate(PROMPTS, sampling, num_samples=1, seed=0)
        assert seen == [1, 3, 3, 3, 3]
        monkeypatch.setattr(local, "SHARED", average + 1)
        model.get_decoder().register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            small.generate(PROMPTS, sampling, num_samples=1, seed=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_that_sample_in_turns_leave_the_process_its_threads() -> None:
    """The second comes to torch while the first samples, and samples when that is done."""
    come, done, before = threading.Event(), threading.Event(), torch.get_num_threads()

    def wait_inside(tokens: Sequence[int]) -> str:
        future = pool.submit(follow)
        assert come.wait(60)
        seen.append(future)
        return spell(tokens)

    def follow() -> None:
        assert torch.get_num_threads() == 1
        come.set()
        assert done.wait(60)
        sample(spell)

    def sample(decode: Any) -> None:
        one, sampling = engine(build("llama"), decode=decode), Sampling(max_new_tokens=2)
        one.generate(PROMPTS[:1], sampling, num_samples=1, seed=0)

    seen: list[Any] = []
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as pool:
            sample(wait_inside)
            done.set()
            seen[0].result()
            assert pool.submit(torch.get_num_threads).result() == 3
        with ThreadPoolExecutor(1) as new:
            assert new.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
