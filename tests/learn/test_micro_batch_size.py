"""How large a micro-batch may be: the law, its limits, and what a learner does with "auto"."""

import pytest
import torch

from posttrain.build.learners import make_learner
from posttrain.config import recipe_from_dict, resolve
from posttrain.learn.learner import LocalLearner
from posttrain.learn.micro_batch_size import (
    LEAST,
    MOST,
    MOST_REPLAYED,
    Memory,
    made_up,
    tokens_on_gpu,
    unallocated,
)
from posttrain.learn.optim import adamw
from posttrain.models.load import load_policy

GIGABYTE = 2**30


def test_the_largest_power_of_two_that_fits() -> None:
    memory = Memory.through((2048, 3 * GIGABYTE), (4096, 5 * GIGABYTE))
    assert memory == Memory(fixed=GIGABYTE, each=GIGABYTE / 1024)
    assert memory.fitting(9 * GIGABYTE) == 8192
    assert memory.fitting(9 * GIGABYTE - 1) == 4096
    assert memory.fitting(16.9 * GIGABYTE) == 8192
    assert memory.fitting(6 * GIGABYTE, most=5120) == 5120
    assert memory.fitting(6 * GIGABYTE - 1, most=5120) == 4096
    assert memory.fitting(0) == LEAST
    assert memory.fitting(1e15) == MOST


def test_what_is_tried_has_the_size_and_only_known_tokens() -> None:
    batch = made_up(4096, vocabulary=50, length=256)
    assert batch.tokens.shape == (16, 256)
    assert 0 <= batch.tokens.min() < batch.tokens.max() < 50
    assert batch.mask.sum() == 16 * 255
    assert made_up(100, vocabulary=50, length=256).tokens.shape == (1, 256)


class Device:
    """A GPU of 7 GB as far as :mod:`fit` sees one: work takes 1 GB and 1 MB a token."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        full_at: int = 10**9,
        error: Exception | None = None,
    ) -> None:
        self.sizes: list[int] = []
        self.full_at = full_at
        self.error = error or torch.cuda.OutOfMemoryError()
        names = {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: GIGABYTE,
            "memory_reserved": lambda device: 3 * GIGABYTE,
            "max_memory_allocated": lambda device: 2 * GIGABYTE + self.sizes[-1] * 2**20,
            "mem_get_info": lambda device: (5 * GIGABYTE, 7 * GIGABYTE),
            "memory_snapshot": list,
            "current_device": lambda: 0,
        }
        for name, function in names.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def work(self, batch: object) -> None:
        self.sizes.append(batch.tokens.numel())
        if self.sizes[-1] >= self.full_at:
            raise self.error


def test_a_gpu_is_tried_twice_after_a_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 % of 7 GB are 5.6 GB: 1 GB, and 4 GB for 4,096 tokens; 8,192 would be 9 GB."""
    device, cuda = Device(monkeypatch), torch.device("cuda")
    assert tokens_on_gpu(cuda, device.work, vocabulary=9) == 4096
    assert device.sizes == [4096, 2048, 4096]
    assert tokens_on_gpu(cuda, device.work, vocabulary=9, needed=3 * GIGABYTE) == 2048
    assert tokens_on_gpu(cuda, device.work, vocabulary=9, longest=128) == 4096


def test_a_gpu_that_is_too_small_gets_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled once is so then, with few tokens beside it; even that may be too much."""
    cuda = torch.device("cuda")
    for error in (torch.cuda.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        for full_at in (4096, 1):
            device = Device(monkeypatch, full_at=full_at, error=error)
            assert tokens_on_gpu(cuda, device.work, vocabulary=9) == LEAST
            assert device.sizes == [4096, 1024]
    device = Device(monkeypatch, full_at=1, error=RuntimeError("shapes"))
    with pytest.raises(RuntimeError, match="shapes"):
        tokens_on_gpu(cuda, device.work, vocabulary=9)


def test_moments_count_until_they_are_there() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = adamw(model, learning_rate=0.1)
    assert unallocated(optimizer) == 2 * 8 * 4
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert unallocated(optimizer) == 0


def learner(**section: object) -> LocalLearner:
    sft = resolve(recipe_from_dict({"task": "arithmetic", "sft": section}))
    policy = load_policy("tiny")
    return make_learner(sft, policy, section=sft.sft, device="cpu", total_steps=1)


def test_auto_is_the_default_and_a_number_is_taken_as_it_is() -> None:
    assert learner().micro_batch_tokens == 4096
    assert learner(micro_batch_tokens="auto").micro_batch_tokens == 4096
    assert learner(micro_batch_tokens=77).micro_batch_tokens == 77


def test_trying_leaves_weights_and_chance_as_they_were() -> None:
    asked = learner()
    before = [weight.detach().clone() for weight in asked.model.parameters()]
    chance = torch.random.get_rng_state()
    with torch.no_grad():  # the first question may be one without gradient
        asked._try(made_up(64, vocabulary=50, length=32))
    assert all(weight.grad is not None for weight in asked.model.parameters())
    asked.trained.clear()
    assert all(map(torch.equal, asked.model.parameters(), before))
    assert torch.equal(torch.random.get_rng_state(), chance)


def test_checkpointing_is_switched_by_the_section() -> None:
    policy = load_policy("tiny")
    kind = type(policy.model.model.layers[0])
    for asked in (True, False):
        recipe = resolve(
            recipe_from_dict({"task": "arithmetic", "sft": {"checkpoint_activations": asked}})
        )
        make_learner(recipe, policy, section=recipe.sft, device="cpu", total_steps=1)
        assert (type(policy.model.model.layers[0]) is kind) != asked


@pytest.mark.parametrize(("gigabytes", "tokens"), [(30, MOST_REPLAYED), (100, MOST)])
def test_what_is_replayed_takes_many_tokens_where_memory_is_plenty(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, tokens: int
) -> None:
    device, cuda = Device(monkeypatch), torch.device("cuda")
    free = gigabytes * GIGABYTE  # 17 GB are needed for the most tokens
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert tokens_on_gpu(cuda, device.work, vocabulary=9) == MOST
    assert tokens_on_gpu(cuda, device.work, vocabulary=9, replayed=True) == tokens
