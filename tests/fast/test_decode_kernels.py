"""The kernels of sampling against their plain forms, on a GPU or by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from posttrain.fast.kv_slots import plain_decode_attention
from posttrain.models.sampling import sample
from posttrain.types import Sampling

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HERE = HAS_TRITON and (INTERPRETED or DEVICE == "cuda")
kernel = pytest.mark.skipif(not HERE, reason="Triton runs on a GPU, or in a process of its own")


def memory(heads: int, size: int, *, dtype: torch.dtype) -> dict[str, Any]:
    """Slots whose prompts and completions end before, at and after the edges of blocks."""
    generator = torch.Generator().manual_seed(heads)

    def states(rows: int, tokens: int) -> torch.Tensor:
        given = torch.randn(rows, heads, tokens, size, generator=generator)
        return given.to(dtype).to(DEVICE)

    def counts(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return {
        "prompt_keys": states(3, 130),
        "prompt_values": states(3, 130),
        "keys": states(7, 90),
        "values": states(7, 90),
        "rows": torch.tensor([5, 0, 3, 6, 1], device=DEVICE),
        "prompt": counts(0, 1, 2, 2, 1, 0, 1),
        "prompt_length": counts(1, 130, 64, 7, 65, 100, 0),
        "written": counts(0, 64, 3, 89, 5, 70, 1),
    }


@kernel
@pytest.mark.parametrize("window", [0, 20, 1])
@pytest.mark.parametrize(
    ("queries", "heads", "size"), [(9, 3, 64), (4, 4, 32), (4, 2, 80), (32, 1, 16)]
)
def test_attention_of_the_newest_token(queries: int, heads: int, size: int, window: int) -> None:
    from posttrain.fast.kernels.decode_attention import decode_attention

    given = memory(heads, size, dtype=torch.float32)
    again = {name: tensor.clone() for name, tensor in given.items()}
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(5, count, size, generator=generator).to(DEVICE)
        for count in (queries, heads, heads)
    )
    options: dict[str, Any] = {"scale": 0.3, "window": window}
    expected = plain_decode_attention(query, key, value, **given, **options)
    found = decode_attention(query, key, value, **again, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name in ("keys", "values"):
        assert torch.equal(given[name], again[name])  # the newest is written, nothing else


@kernel
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("queries", "heads", "size"), [(9, 3, 64), (4, 4, 80), (32, 1, 16)])
def test_small_programs_say_what_large_ones_do(
    queries: int, heads: int, size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.fast.kernels import decode_attention as module

    states = [torch.randn(5, n, size, device=DEVICE).half() for n in (queries, heads, heads)]
    found = []
    for many in (1, 10_000):
        monkeypatch.setattr(module, "MANY", many)
        given = memory(heads, size, dtype=torch.float16)
        found.append(module.decode_attention(*states, **given, scale=0.3, window=window))
    torch.testing.assert_close(*found, rtol=5e-3, atol=5e-3)


@kernel
def test_parts_of_one_product_are_read_where_they_stand() -> None:
    from posttrain.fast.kernels.decode_attention import decode_attention

    given = memory(3, 64, dtype=torch.float32)
    again = {name: tensor.clone() for name, tensor in given.items()}
    joined = torch.randn(5, 15 * 64, device=DEVICE).split([9 * 64, 3 * 64, 3 * 64], 1)
    parts = [part.view(5, -1, 64) for part in joined]
    assert not any(part.is_contiguous() for part in parts)
    expected = decode_attention(*(p.contiguous() for p in parts), **given, scale=1.0, window=0)
    assert torch.equal(decode_attention(*parts, **again, scale=1.0, window=0), expected)
    assert torch.equal(given["values"], again["values"])


@kernel
@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(dtype: torch.dtype) -> None:
    from posttrain.fast.kernels.decode_attention import decode_attention

    given = memory(3, 64, dtype=dtype)
    states = [torch.randn(5, count, 64, device=DEVICE).to(dtype) for count in (9, 3, 3)]
    found = decode_attention(*states, **given, scale=0.125, window=0)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    wide = [tensor.double() for tensor in states]
    expected = plain_decode_attention(*wide, **exact, scale=0.125, window=0)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@kernel
def test_what_is_new_is_rounded_to_what_is_kept() -> None:
    from posttrain.fast.kernels.decode_attention import decode_attention

    states = [torch.randn(5, count, 64, device=DEVICE) for count in (9, 3, 3)]
    halves = [tensor.half() for tensor in states]
    given = memory(3, 64, dtype=torch.float16)
    again = {name: tensor.clone() for name, tensor in given.items()}
    found = decode_attention(*states, **given, scale=0.125, window=0)
    assert torch.equal(found, decode_attention(*halves, **again, scale=0.125, window=0))
    assert found.dtype == torch.float16
    assert torch.equal(given["keys"], again["keys"])


@kernel
@pytest.mark.parametrize("size", [105, 5000, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_draw(size: int, temperature: float) -> None:
    from posttrain.fast.kernels.draw import draw

    generator = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(64, size, generator=generator)).to(DEVICE)
    logits[0, : size // 2] = -torch.inf
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64).to(DEVICE)
    uniforms[1], uniforms[2] = 0.0, 1 - 2**-53
    found, likely = draw(logits, uniforms, temperature=temperature)
    exact = sample(logits.double(), uniforms, sampling=Sampling(temperature=temperature))
    # Within rounding of a boundary either neighbour is right.
    assert int((found != exact[0]).sum()) <= 1
    expected = (logits.double() / temperature).log_softmax(-1).gather(-1, found[:, None])[:, 0]
    torch.testing.assert_close(likely.double(), expected, rtol=1e-5, atol=1e-5)


@kernel
def test_rounding_never_draws_a_token_that_is_all_but_impossible() -> None:
    """At the end of the vocabulary, where what is left of the sum is rounding."""
    from posttrain.fast.kernels.draw import draw

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 12288, generator=generator)
    logits[32:] = logits[32:].sort(-1).values
    logits[:, -1] = -75
    uniforms = torch.full((64,), 1 - 1e-8, dtype=torch.float64)
    _, likely = draw(logits.to(DEVICE), uniforms.to(DEVICE), temperature=1.0)
    assert float(likely.min()) > -30


@kernel
def test_draws_follow_the_distribution() -> None:
    from posttrain.fast.kernels.draw import draw

    share = torch.tensor([0.5, 0.2, 0.0, 0.3], device=DEVICE)
    uniforms = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64, device=DEVICE)
    tokens, _ = draw(share.log().repeat(1000, 1), uniforms, temperature=1.0)
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 200, 0, 300]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the kernels run in this process")
def test_the_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout
