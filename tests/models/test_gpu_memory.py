"""What a GPU has left: recordings keep memory that PyTorch counts as free."""

import pytest
import torch

from posttrain.models import gpu_memory
from posttrain.models.gpu_memory import captured_bytes, free_bytes, limit_memory, parse_size


def test_what_graphs_keep_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(pool: tuple[int, int], *, device: int = 0, allocated: int = 0) -> dict[str, object]:
        size = {"total_size": 100, "allocated_size": allocated}
        return {**size, "device": device, "segment_pool_id": pool}

    segments = [
        segment((0, 0)),  # anybody's
        segment((0, 1), allocated=30),
        segment((0, 2)),
        segment((0, 2), device=1),
    ]
    answers = {
        "memory_snapshot": lambda: segments,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (1000, 2000),
        "memory_reserved": lambda device: 300,
        "memory_allocated": lambda device: 30,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert captured_bytes("cuda") == captured_bytes("cuda:0") == 70 + 100
    assert captured_bytes("cuda:1") == 100
    assert free_bytes("cuda") == 1000 + 270 - 170


def test_a_limit_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 bytes the process may have 600 and has taken 300, of which 30 are in use."""
    asked: list[tuple[float, int]] = []
    answers = {
        "memory_snapshot": list,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (1000, 2000),
        "memory_reserved": lambda device: 300,
        "memory_allocated": lambda device: 30,
        "set_per_process_memory_fraction": lambda *given: asked.append(given),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(gpu_memory, "_limits", {})
    assert free_bytes("cuda") == 1000 + 270
    limit_memory("cuda", 600)
    assert asked == [(0.3, 0)]
    assert free_bytes("cuda") == free_bytes("cuda:0") == 300 + 270
    assert free_bytes("cuda:1") == 1000 + 270
    limit_memory("cuda", 4000)
    assert asked[-1] == (1.0, 0)
    assert free_bytes("cuda") == 1000 + 270


def test_an_amount_of_memory_is_read_as_it_is_written() -> None:
    assert parse_size("8GB") == parse_size("8 GiB") == parse_size("8g") == 8 * 2**30
    assert parse_size("1.5GB") == 3 * 2**29
    for wrong in ("8", "GB", "8TB", "eight GB"):
        with pytest.raises(ValueError, match="write 8GB or 512MB"):
            parse_size(wrong)
