"""Replicas of a small model learn at the same time: the same as one pass after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_arithmetic import float64_throughout
from small_model import small_model
from torch import Tensor, nn

from posttrain.algorithms import clipped, token_mean
from posttrain.fast import replicas as fast_replicas
from posttrain.fast.replicas import Replicas, replicas_for, sharing_weights
from posttrain.learn import sums
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.frozen import Reference
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a test are shared out that would be too small for it; its loss is trusted."""
    monkeypatch.setattr(sums, "LEAST", SHARE)
    monkeypatch.setattr(fast_replicas, "KNOWN", {*fast_replicas.KNOWN, __name__.split(".")[0]})


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many shares each batch was parted."""
    seen: list[int] = []
    each = Replicas.each

    def counted(own: Replicas, work: Any, shares: Any) -> Any:
        seen.append(len(shares))
        return each(own, work, shares)

    monkeypatch.setattr(Replicas, "each", counted)
    return seen


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models compute in float64 throughout, in the threads of replicas too."""
    each = Replicas.each

    def widened(replicas: Replicas, work: Any, shares: Any) -> Any:
        def inside(*given: Any) -> Any:
            with float64_throughout():
                return work(*given)

        return each(replicas, inside, shares)

    monkeypatch.setattr(Replicas, "each", widened)
    with float64_throughout():
        yield


GROUPS, MEMBERS, PROMPT, ANSWER, SHARE = 6, 4, 5, 40, 40


def made_up(*, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Groups with a prompt each, and answers of their own length."""
    drawn = torch.Generator().manual_seed(seed)
    rows = GROUPS * MEMBERS
    tokens = torch.randint(3, 40, (rows, PROMPT + ANSWER), generator=drawn)
    tokens[:, :PROMPT] = tokens[::MEMBERS, :PROMPT].repeat_interleave(MEMBERS, 0)
    ends = torch.randint(PROMPT + 10, PROMPT + ANSWER + 1, (rows, 1), generator=drawn)
    real = torch.arange(PROMPT + ANSWER) < ends
    mask = real & (torch.arange(PROMPT + ANSWER) >= PROMPT)
    batch = Batch(
        tokens=tokens * real,
        mask=mask,
        attention=real,
        groups=torch.arange(GROUPS).repeat_interleave(MEMBERS),
        advantages=torch.randn(rows, 1, generator=drawn, dtype=dtype) * mask,
    )
    return token_mean(batch)


def learner(*, replicas: int, dtype: torch.dtype = torch.float64, **options: Any) -> LocalLearner:
    model = small_model().to(dtype)
    return LocalLearner(
        model,
        adamw(model, learning_rate=1e-2),
        save=lambda folder: None,
        replicas=replicas,
        max_gradient_norm=1e9,
        **options,
    )


def loss(outputs: Outputs, batch: Batch) -> Terms:
    return clipped(outputs.need("logprobs"), batch)


def gradients(one: LocalLearner, batch: Batch) -> dict[str, Tensor]:
    one._summed(batch, Objective(loss), learning=[one.trained])
    return {name: weight.grad.clone() for name, weight in one.model.named_parameters()}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("keep_groups", [False, True])
def test_the_gradient_is_that_of_one_pass_after_the_other(
    replicas: int, keep_groups: bool, shared: list[int]
) -> None:
    batch = made_up()
    assert int(batch.active.sum()) > 8 * SHARE, "every replica has something to do"
    options = {"keep_groups": keep_groups, "micro_batch_tokens": 150}
    plain = gradients(learner(replicas=1, **options), batch)
    found = gradients(learner(replicas=replicas, **options), batch)
    assert shared == [min(replicas, 6) if keep_groups else replicas]
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("exact")
def test_a_step_reports_and_records_the_same() -> None:
    batch = made_up()
    batch = batch.replace(weights=batch.need("weights") * (torch.arange(24) % 5 != 0)[:, None])
    recorded = torch.arange(24) % 3 == 0
    one, many = (
        learner(replicas=n).step(batch, Objective(loss, recorded=recorded)) for n in (1, 3)
    )
    assert many.metrics.keys() == one.metrics.keys()
    for name, value in one.metrics.items():
        assert many.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert many.loss == pytest.approx(one.loss, rel=1e-9, abs=1e-12)
    assert many.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-9)
    assert many.tokens.keys() == one.tokens.keys()
    for name, value in one.tokens.items():
        torch.testing.assert_close(many.tokens[name], value, rtol=1e-9, atol=1e-12)


def test_the_same_step_gives_the_same_bits_again() -> None:
    """Which thread is done first must not matter: gradients are added in a fixed order."""
    found = []
    for _ in range(4):
        one = learner(replicas=3, dtype=torch.float32, micro_batch_tokens=100)
        for seed in range(3):
            one.step(made_up(dtype=torch.float32, seed=seed), Objective(loss))
        found.append({name: w.clone() for name, w in one.model.named_parameters()})
    for other in found[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in found[0].items())


@pytest.mark.usefixtures("exact")
def test_steps_after_steps_see_new_weights_and_no_old_gradient() -> None:
    one, many = learner(replicas=1), learner(replicas=3)
    for seed in range(4):
        batch = made_up(seed=seed)
        few = batch.select(torch.arange(2 + seed))  # now more rows, now fewer replicas at work
        for each in (one, many):
            each.step(batch, Objective(loss))
            each.step(few, Objective(loss))
    for (name, weight), other in zip(
        one.model.named_parameters(), many.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other, weight, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.usefixtures("exact")
def test_weights_of_other_memory_are_noticed() -> None:
    """A model may be given other weights by assignment: replicas must not keep the old ones."""
    one, many = learner(replicas=1), learner(replicas=3)
    for each in (one, many):
        each.step(made_up(), Objective(loss))
        for weight in each.model.parameters():
            weight.data = weight.detach() * 1.5
    batch = made_up(seed=1)
    plain, found = gradients(one, batch), gradients(many, batch)
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-10)


def test_replicas_share_memory_but_no_gradient() -> None:
    model = small_model()
    model.lm_head.weight.requires_grad_(False)
    other = sharing_weights(model)
    for weight, replica in zip(model.parameters(), other.parameters(), strict=True):
        assert (replica is weight) is not weight.requires_grad
        assert replica.data_ptr() == weight.data_ptr()
        assert replica.requires_grad == weight.requires_grad
    for buffer, replica in zip(model.buffers(), other.buffers(), strict=True):
        assert replica.data_ptr() == buffer.data_ptr()
    assert other.config is not model.config, "attention is chosen in it, by each thread"


def test_an_error_in_one_thread_ends_the_step_when_all_are_done() -> None:
    done, replicas = [], Replicas(nn.Linear(2, 2), 3)

    def work(model: nn.Module, number: int) -> int:
        if number == 1:
            raise ValueError("no such loss")
        model(torch.ones(1, 2)).sum().backward()
        done.append(number)
        return number

    with pytest.raises(ValueError, match="no such loss"):
        replicas.each(work, [0, 1, 2])
    assert sorted(done) == [0, 2]
    replicas.model.zero_grad()
    assert replicas.each(lambda model, number: number, [5, 6]) == [5, 6]
    assert replicas.model.weight.grad is None, "what the failed step left is gone"


def test_threads_of_replicas_compute_alone_and_others_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        replicas = Replicas(nn.Linear(2, 2), 2)
        seen = replicas.each(lambda model, share: torch.get_num_threads(), [0, 1])
        assert seen == [1, 1]
        new: list[int] = []
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), new) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_without_a_gradient_the_numbers_are_said_all_the_same() -> None:
    batch = made_up()
    batch = batch.replace(weights=torch.zeros_like(batch.need("weights")))
    found = learner(replicas=3).step(batch, Objective(loss))
    assert found.gradient_norm == 0
    assert found.metrics["approx_kl"] == pytest.approx(0, abs=1e-9)


def test_who_has_replicas() -> None:
    assert replicas_for(small_model(), 2) == 2
    assert replicas_for(small_model(), 64) == 8
    assert replicas_for(nn.Linear(1024, 1024), 64) == 1
    own = nn.Sequential(small_model())
    own.__class__ = type("Own", (nn.Sequential,), {"__module__": "users_own"})
    assert replicas_for(own, 2) == 1, "it may hold what cannot be copied"
    with torch.device("meta"):
        assert replicas_for(nn.Linear(2, 2), 2) == 1


def test_a_critic_or_a_reference_learn_and_answer_as_ever() -> None:
    batch = made_up()
    with_reference = learner(replicas=3, reference=Reference())
    inferred = with_reference.infer(batch)
    torch.testing.assert_close(inferred.ref_logprobs, inferred.old_logprobs)


def test_a_small_batch_is_not_shared_out(shared: list[int]) -> None:
    """Passes over few tokens take as long as those over some more."""
    one, batch = learner(replicas=3), made_up()
    few = batch.select(torch.arange(3))
    assert SHARE < int(few.active.sum()) < 2 * SHARE
    one.step(few, Objective(loss))
    assert shared == []
    one.step(batch.select(torch.arange(4)), Objective(loss))
    one.step(batch, Objective(loss))
    assert shared == [2, 3]


@pytest.mark.usefixtures("exact")
def test_a_hook_on_a_weight_sees_the_whole_gradient(shared: list[int]) -> None:
    """Who keeps rows of the embedding as they are by a hook must not find them changed."""
    found = []
    for replicas in (1, 3):
        one = learner(replicas=replicas)
        weight = one.model.get_input_embeddings().weight
        weight.register_hook(
            lambda gradient: gradient * (torch.arange(len(gradient)) > 20)[:, None]
        )
        one.step(made_up(), Objective(loss))
        found.append(weight.detach().clone())
    assert torch.equal(found[0][:20], found[1][:20])
    assert torch.equal(found[0], found[1])
    assert shared == []


def test_a_loss_or_a_model_of_a_users_own_is_called_by_one_thread(
    monkeypatch: pytest.MonkeyPatch, shared: list[int]
) -> None:
    """It may keep count, or draw random numbers in the order of calls."""
    one, batch = learner(replicas=3), made_up()
    one.model.train()
    one.step(batch, Objective(loss))
    one.model.eval()
    monkeypatch.undo()
    monkeypatch.setattr(sums, "LEAST", SHARE)
    replicas = one._replicas
    assert replicas is not None
    assert replicas.take(functools.partial(token_mean, given=clipped))
    wrapped = functools.wraps(clipped)(lambda *given: clipped(*given))
    given = functools.partial(token_mean, given=loss)
    decorated = torch.no_grad()(loss)  # whose code around it is of PyTorch
    for own in (loss, functools.partial(loss), given, wrapped, decorated):
        assert not replicas.take(own)
    one.step(batch, Objective(loss))
    assert shared == []


@pytest.mark.parametrize("change", ["forward", "compiled", "hook of all modules", "autocast"])
def test_what_one_thread_alone_would_do_is_not_shared_out(change: str) -> None:
    """A forward that stands in a module calls that module's own parts, whoever has a copy of it."""
    replicas = Replicas(small_model(), 2)
    layer = replicas.model.model.layers[0].mlp
    assert replicas.take(clipped)
    with contextlib.ExitStack() as ends:
        if change == "forward":
            layer.forward = functools.partial(type(layer).forward, layer)
        elif change == "compiled":
            layer._compiled_call_impl = layer.forward
        elif change == "autocast":
            ends.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        else:
            handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
            ends.callback(handle.remove)
        assert not replicas.take(clipped)


def test_what_a_user_has_attached_need_not_be_copied() -> None:
    model = small_model()
    weight = torch.ones(2, requires_grad=True)
    attached = {"lock": threading.Lock(), "loss": (2 * weight).sum(), "kept": torch.ones(2)}
    for name, value in attached.items():
        setattr(model.model, name, value)
    inside: list[Any] = [{"lock": threading.Lock(), "part": model.lm_head}]
    inside.append(inside)
    model.model.inside = inside
    other = sharing_weights(model)
    assert all(getattr(other.model, name) is value for name, value in attached.items())
    assert other.model.inside[0]["lock"] is inside[0]["lock"]
    assert other.model.inside[0]["part"] is other.lm_head
    assert other.model.inside[1] is other.model.inside
    assert other.model is not model.model
    assert other.model.layers[0].self_attn.config is other.config, "as all layers have it"


def test_an_interrupt_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient would be added to that of the next step."""
    replicas, begun = Replicas(nn.Linear(2, 2, bias=False), 2), threading.Barrier(3)
    go_on = threading.Event()
    calls = []

    def interrupted(running: Any) -> None:
        calls.append(len(running))
        if len(calls) == 1:
            begun.wait()
            go_on.set()
            raise KeyboardInterrupt
        concurrent.futures.wait(running)

    def work(model: nn.Module, share: int) -> None:
        begun.wait()
        go_on.wait()
        model(torch.ones(1, 2)).sum().backward()

    monkeypatch.setattr(fast_replicas, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replicas.each(work, [0, 1])
    assert calls == [2, 2]
    replicas.model.zero_grad()
    replicas.each(lambda model, share: model(torch.ones(1, 2)).sum().backward(), [0, 1])
    assert torch.equal(replicas.model.weight.grad, torch.full((2, 2), 2.0))


def test_a_change_of_the_model_between_steps_is_seen_by_all() -> None:
    replicas = Replicas(nn.Sequential(nn.Linear(2, 2)), 2)

    def work(model: nn.Module, share: int) -> float:
        return float(model[0].scale)

    for scale in (1.0, 0.5):
        replicas.model[0].scale = scale
        assert replicas.each(work, [0, 1]) == [scale, scale]
