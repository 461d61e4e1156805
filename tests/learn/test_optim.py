"""The optimiser and its schedule."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from posttrain.learn.checkpoint import _load_optimizer, _save_optimizer
from posttrain.learn.micro_batch_size import unallocated
from posttrain.learn.optim import adamw, moment_bytes, rate_factor
from posttrain.learn.ranks import ALONE
from posttrain.learn.trained import Trained


def factors(steps: int, **options: object) -> list[float]:
    return [rate_factor(step, **options) for step in range(steps)]


def test_schedules_by_hand() -> None:
    """Warm-up is linear and reaches the peak at its last step; then each schedule goes its way."""
    warm = [0.25, 0.5, 0.75, 1.0]
    assert factors(8, total=8, warmup=4, schedule="constant") == warm + [1.0] * 4
    assert factors(8, total=8, warmup=4, schedule="linear") == [*warm, 1.0, 0.75, 0.5, 0.25]
    cosine = [(1 + math.cos(math.pi * quarter / 4)) / 2 for quarter in range(4)]
    assert factors(8, total=8, warmup=4, schedule="cosine") == pytest.approx(warm + cosine)
    assert cosine[2] == 0.5


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert rate_factor(0, total=5, warmup=0, schedule=schedule) == 1.0


def test_past_the_end_the_rate_stays_at_zero() -> None:
    """A batch left early takes fewer steps than planned, never more; if more, they do nothing."""
    for schedule in ("linear", "cosine"):
        assert factors(9, total=5, warmup=0, schedule=schedule)[5:] == pytest.approx([0.0] * 4)


def test_a_warm_up_as_long_as_the_run() -> None:
    assert factors(3, total=3, warmup=3, schedule="cosine") == pytest.approx([1 / 3, 2 / 3, 1.0])


class Mixed(nn.Module):
    """A matrix, a bias, a norm, and a matrix that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def test_the_betas_are_what_the_running_means_keep() -> None:
    """Gradients 1 and 3 with β = (½, ¾): m = ½·½ + ½·3 = 7/4 of 1 − ½² = 3/4; v = ¾·¼ + ¼·9 = 39/16
    of 1 − (¾)² = 7/16. The first step is 0.1 whatever β is, the second 0.1 · (7/3) / √(39/7).
    """
    weight = nn.Linear(1, 1, bias=False).double()
    before = weight.weight.item()
    optimizer = adamw(weight, learning_rate=0.1, betas=(0.5, 0.75))
    for gradient in (1.0, 3.0):
        weight.weight.grad = torch.full_like(weight.weight, gradient)
        optimizer.step()
    moved = 0.1 + 0.1 * (7 / 3) / math.sqrt(39 / 7)
    assert before - weight.weight.item() == pytest.approx(moved, rel=1e-7)
    assert adamw(weight, learning_rate=0.1).param_groups[0]["betas"] == (0.9, 0.95)


def test_weight_decay_touches_matrices_only() -> None:
    """Without a gradient to follow, one step shrinks a matrix by 1 − rate · decay, nothing else."""
    model = Mixed().double()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = adamw(model, learning_rate=0.1, weight_decay=0.5)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "linear.weight" else 1.0
        assert torch.allclose(weight, factor * before[name], rtol=1e-12, atol=0), name


def test_the_first_step_is_the_rate_against_the_sign() -> None:
    """Adam's moments are bias-corrected: g / (|g| + ε)."""
    model = nn.Linear(2, 1, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = adamw(model, learning_rate=0.1)
    model.weight.grad = torch.tensor([[3.0, -1e-8]], dtype=torch.float64)
    optimizer.step()
    expected = before - 0.1 * torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    assert torch.allclose(model.weight, expected, rtol=0, atol=1e-9)


def test_one_kernel_for_all_weights_takes_the_same_steps() -> None:
    """Fused AdamW against the plain one of PyTorch, over three steps in float64."""
    models = [Mixed().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fast = adamw(models[0], learning_rate=0.1, weight_decay=0.5)
    assert all(group["fused"] for group in fast.param_groups)
    slow = adamw(models[1], learning_rate=0.1, weight_decay=0.5)
    for group in slow.param_groups:
        group["fused"] = False
    for step in range(3):
        for model, optimizer in zip(models, (fast, slow), strict=True):
            for number, weight in enumerate(model.parameters()):
                if weight.requires_grad:
                    weight.grad = torch.full_like(weight, 0.1 * (step - 1) + number)
            optimizer.step()
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def rounded(seed: int = 0) -> Trained:
    """A matrix that is rounded to 8 bits, a small one and a vector that are not."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 8))
    return Trained(model, adamw(model, learning_rate=1e-2, weight_decay=0.1, moments="8bit"))


def learn(trained: Trained, *steps: int) -> None:
    for step in steps:
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        trained.clear()
        (trained.module(inputs) - inputs[:, :8]).square().mean().backward()
        trained.apply(trained.norm())


def test_8_bit_moments_come_back_bit_for_bit(tmp_path: Path) -> None:
    """A run that was cut short goes on as if it had not been; without the moments it would not."""
    pytest.importorskip("bitsandbytes")
    whole, cut = rounded(), rounded()
    learn(whole, *range(6))
    learn(cut, *range(3))
    numbers = _save_optimizer(cut, tmp_path / "moments.safetensors", ranks=ALONE)
    again, forgot = rounded(1), rounded(2)
    again.module.load_state_dict(cut.module.state_dict())
    _load_optimizer(again, tmp_path / "moments.safetensors", numbers=numbers)
    learn(again, *range(3, 6))
    for name, weight in whole.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[name]), name
    forgot.module.load_state_dict(cut.module.state_dict())
    learn(forgot, *range(3, 6))
    assert not torch.equal(forgot.module[0].weight, whole.module[0].weight)


def test_8_bit_moments_take_the_bytes_that_are_counted() -> None:
    """8,192 weights in 8 bits with 32 scales, 1,032 in float32; the code books are a kilobyte."""
    pytest.importorskip("bitsandbytes")
    trained = rounded()
    counted = unallocated(trained.optimizer)
    assert counted == 2 * (8192 + 4 * 32) + 8 * (8 * 128 + 8)
    learn(trained, 0)
    states = trained.optimizer.state.values()
    kept = [
        v for s in states for k, v in s.items() if isinstance(v, torch.Tensor) and "qmap" not in k
    ]
    assert sum(v.numel() * v.element_size() for v in kept) == counted
    assert counted == moment_bytes(trained.module.parameters(), "8bit")


def test_8_bit_moments_without_their_package_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"adam_moments: .*posttrain\[bitsandbytes\]"):
        rounded()
