"""Passes with aliases of the weights, and captures that fail, without a GPU."""

import weakref
from typing import Any

import pytest
import torch
from fast.test_buckets import packed, rows
from fast.test_packed_states import CASES, batch
from models.families import build
from torch import Tensor, nn

from posttrain.data.minibatch import micro_batches
from posttrain.fast import captured_pass as recorded_pass
from posttrain.fast.attention import gathered as gathered_attention
from posttrain.fast.attention.blockwise import Plain
from posttrain.fast.attention.gathered import Gathered, GatheredPrompts, sequences_of
from posttrain.fast.captured_pass import CapturedPasses, _Pass, pausing
from posttrain.fast.cast_copy import Aliases
from posttrain.fast.graphs import CaptureError
from posttrain.fast.packing import Packing
from posttrain.learn.memory import smaller, until_it_fits
from posttrain.models.head import project
from posttrain.types import Batch

FAMILIES = ["llama", "llama tied", "qwen3", "qwen3_moe", "gpt2", "gpt_neox", "gemma"]


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def plain(packing: Packing, *, like: Tensor) -> GatheredPrompts:
        return GatheredPrompts(Gathered.of(sequences_of(packing), like=like, make=Plain))

    monkeypatch.setattr(recorded_pass, "packed_attention", plain)


def outcome(model: Any, given: list[Batch], *, captured: CapturedPasses | None) -> list[Tensor]:
    """States of batches, and the gradients that they add up to, under autocast."""
    model.zero_grad()
    found = []
    for one in given:
        packing = packed(one)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            if captured is None:
                attention = recorded_pass.packed_attention(packing, like=one.tokens)
                ordinary = _Pass(model.get_decoder(), attention, weights={})
                row = one.tokens.flatten()[packing.source]
                states = ordinary(row, packing.positions)[packing.before]
            else:
                states = captured.states(one.tokens, packing)
            logits = project(model, states)
        logits.float().log_softmax(-1)[:, 2].sum().backward()
        found.append(states.detach().double())
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return [torch.cat(found), torch.cat(gradients)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_aliases_give_the_states_and_gradients_of_the_weights(name: str, frozen: bool) -> None:
    """Of several batches, and again once the weights are others; some of them may not learn."""
    model = build(name, dtype=torch.float32)
    for number, weight in enumerate(model.parameters()):
        weight.requires_grad_(not (frozen and number % 3 == 0))
    captured = CapturedPasses(model.get_decoder(), torch.bfloat16)
    given = [batch(rows) for rows in list(CASES.values())[:2]]
    for _ in range(2):
        expected = outcome(model, given, captured=None)
        captured.refresh()
        with pausing(captured):
            found = outcome(model, given, captured=captured)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
    assert not captured.paused


def test_nothing_holds_captures_that_are_let_go() -> None:
    model = build("llama", dtype=torch.float32)
    captured = CapturedPasses(model.get_decoder(), torch.bfloat16)
    with pausing(captured):
        outcome(model, [batch(CASES["even groups"])], captured=captured)
    there = weakref.ref(captured)
    del captured
    assert there() is None


class Recording:
    """A capture of nothing, for which there is room up to ``most`` tokens."""

    most = 6000
    error: type[Exception] = torch.OutOfMemoryError
    made: list[int]

    def __init__(self, owner: CapturedPasses, bucketed: Any, *, tokens: Tensor) -> None:
        self._size = bucketed.bucket.tokens
        if self._size > self.most:
            raise self.error(f"a bucket of {self._size}")
        self.made.append(self._size)

    def replay(self, tokens: Tensor, bucketed: Any) -> Tensor:
        return torch.zeros(self._size, 4, requires_grad=True)


def test_smaller_parts_are_captured_where_large_ones_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_pass, "_CapturedPass", Recording)
    monkeypatch.setattr(Recording, "made", [], raising=False)
    captured = CapturedPasses(torch.nn.Linear(2, 2))
    whole, size = rows(prompts=16, siblings=8, asked=48, answered=256), 8192

    def cut(tokens: int) -> list[Any]:
        return micro_batches(whole, tokens, share_prompts=True)

    def work() -> None:
        for _, part in cut(size):
            captured.states(part.tokens, packed(part))

    def shrink(reason: str) -> None:
        nonlocal size
        captured.forget()
        size = smaller(size, lambda tokens: len(cut(tokens)), reason=reason)

    with pytest.warns(UserWarning, match="4,096|4096"):
        until_it_fits(work, shrink)
    assert size == 4096
    assert Recording.made == [4096]


def test_a_trunk_that_cannot_be_captured_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_pass, "_CapturedPass", Recording)
    monkeypatch.setattr(Recording, "most", 0)
    monkeypatch.setattr(Recording, "error", CaptureError)
    model = build("llama", dtype=torch.float32)
    captured = CapturedPasses(model.get_decoder(), torch.bfloat16)
    given = [batch(CASES["even groups"])] * 2
    expected = outcome(model, given, captured=None)
    with pytest.warns(UserWarning, match="a bucket of 128") as said:
        found = outcome(model, given, captured=captured)
    assert len(said) == 1
    assert torch.equal(found[0], expected[0])


def test_a_window_that_is_too_short_is_refused() -> None:
    packing = packed(rows(prompts=1, siblings=2, asked=3, answered=4))
    states = torch.zeros(1, 1, 9, 8)
    gathered = Gathered.of(sequences_of(packing), like=states, make=Plain)
    attention = gathered_attention.GatheredPrompts(gathered)
    with pytest.raises(NotImplementedError, match="window"):
        attention.attend(states, states, states, layer=0, scale=1.0, window=5)
    assert attention.attend(states, states, states, layer=0, scale=1.0, window=6).shape[1] == 9


def test_a_gradient_that_could_not_be_moved_is_not_added_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(2, 2, bias=False)
    aliases = Aliases(module, torch.float32)
    weight = aliases.named["weight"]

    def fail(*_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    aliases.attach_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "add_", fail)
        loss = (1000 * weight).sum()
        with pytest.raises(RuntimeError, match="during capture"):
            loss.backward()
    module.zero_grad()
    aliases.attach_gradients()
    weight.sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 2))
