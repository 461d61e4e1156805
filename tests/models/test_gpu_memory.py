"""What a GPU has left: recordings keep memory that PyTorch counts as free."""

import pytest
import torch

from posttrain.models.gpu_memory import captured_bytes, free_bytes


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
