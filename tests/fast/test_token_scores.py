"""token_scores against whole logits and autograd: every mode, every type, and what it holds."""

import pytest
import torch
from models.allocations import peak_bytes
from torch import Tensor

from posttrain.fast import token_scores as module
from posttrain.fast.token_scores import (
    Distribution,
    chunk_elements_for,
    kept_elements_for,
    token_scores,
)
from posttrain.models.head import Finish
from posttrain.models.sampling import filter_logits

TOKENS, WIDTH, VOCABULARY = 13, 8, 31

DISTRIBUTIONS = {
    "plain": Distribution(),
    "greedy": Distribution(temperature=0.0),
    "temperature": Distribution(temperature=0.6),
    "top-k": Distribution(top_k=4),
    "top-p": Distribution(temperature=1.3, top_p=0.7),
    "both": Distribution(temperature=0.8, top_k=9, top_p=0.8),
    "scaled": Distribution(finish=Finish(multiplier=0.3, divisor=0.2), temperature=0.9),
    "capped": Distribution(finish=Finish(cap=4.0), temperature=0.7),
    "all": Distribution(
        finish=Finish(multiplier=1.5, divisor=0.9, cap=5.0), temperature=0.7, top_k=12, top_p=0.9
    ),
}


def problem(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> dict[str, Tensor | None]:
    """States, tokens and a head that make peaked distributions."""
    generator = torch.Generator().manual_seed(3)
    made = [
        torch.randn(shape, generator=generator) for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH))
    ]
    offset = torch.randn(VOCABULARY, generator=generator) if bias else None
    return {
        "states": made[0].to(dtype).requires_grad_(True),
        "weight": made[1].to(dtype).requires_grad_(True),
        "bias": None if offset is None else offset.to(dtype).requires_grad_(True),
        "tokens": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
    }


def naive(given: dict[str, Tensor | None], distribution: Distribution) -> tuple[Tensor, Tensor]:
    """The definition, with whole logits."""
    logits = given["states"] @ given["weight"].t()
    logits = logits if given["bias"] is None else logits + given["bias"]
    logits = distribution.finish(logits) / (distribution.temperature or 1.0)
    index = given["tokens"][:, None]
    kept = filter_logits(logits, top_k=distribution.top_k, top_p=distribution.top_p)
    kept = kept.scatter(-1, index, logits.gather(-1, index))
    every = kept.log_softmax(-1)
    possible = every.masked_fill(torch.isneginf(every), 0.0)
    return every.gather(-1, index)[:, 0], -(every.exp() * possible).sum(-1)


def scored(given: dict[str, Tensor | None], **options: object) -> tuple[Tensor, Tensor]:
    given = dict(given)
    return token_scores(given.pop("states"), given.pop("tokens"), **given, **options)


def gradients(given: dict[str, Tensor | None], loss: Tensor) -> dict[str, Tensor]:
    wanted = {
        name: value
        for name, value in given.items()
        if value is not None and value.is_floating_point()
    }
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("rows", [4, TOKENS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_values_and_gradients_equal_the_definition(
    name: str, entropy: str, bias: bool, rows: int, dtype: torch.dtype, limit: float
) -> None:
    distribution, exact, given = DISTRIBUTIONS[name], problem(bias=bias), problem(dtype, bias=bias)
    signs = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    logprobs, entropies = naive(exact, distribution)
    share = 0.7 if entropy == "gradient" else 0.0
    wanted = gradients(exact, (signs * (logprobs + share * entropies.flip(0))).sum())
    found = scored(
        given, distribution=distribution, entropy=entropy, chunk_elements=rows * VOCABULARY
    )
    assert found[0].dtype == found[1].dtype == dtype
    assert found[1].requires_grad == (entropy == "gradient")
    torch.testing.assert_close(found[0].double(), logprobs, rtol=limit, atol=limit)
    expected = torch.zeros_like(entropies) if entropy == "none" else entropies
    torch.testing.assert_close(found[1].double(), expected, rtol=limit, atol=limit)
    got = gradients(given, (signs * (found[0] + share * found[1].flip(0))).sum())
    for key, gradient in wanted.items():
        assert got[key].dtype == dtype
        assert (got[key] - gradient).norm() / gradient.norm() < limit, key


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_differences_find_the_same_gradient(name: str) -> None:
    given = problem()

    def scores(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return token_scores(
            states,
            given["tokens"],
            weight=weight,
            bias=bias,
            distribution=DISTRIBUTIONS[name],
            entropy="gradient",
            chunk_elements=5 * VOCABULARY,
        )

    assert torch.autograd.gradcheck(scores, (given["states"], given["weight"], given["bias"]))


@pytest.mark.parametrize("rows", [1, 4, TOKENS, 1000])
def test_chunks_bound_what_is_held_and_nothing_else(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, seen = problem(), []
    whole = scored(given, entropy="gradient")
    wanted = gradients(given, (whole[0] * whole[1]).sum())
    real = module._Head.logits

    def watched(head: object, states: Tensor, tokens: Tensor) -> Tensor:
        seen.append(len(states))
        return real(head, states, tokens)

    monkeypatch.setattr(module._Head, "logits", watched)
    parts = scored(given, entropy="gradient", chunk_elements=rows * VOCABULARY + VOCABULARY - 1)
    got = gradients(given, (parts[0] * parts[1]).sum())
    assert max(seen) <= rows
    # Forward, and again backward; but a single chunk is kept.
    assert sum(seen) == (TOKENS if rows >= TOKENS else 2 * TOKENS)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-12, atol=1e-13)


def test_only_what_is_wanted_gets_a_gradient() -> None:
    given = problem()
    given["weight"].requires_grad_(False)
    scored(given)[0].sum().backward()
    assert given["weight"].grad is None
    assert given["states"].grad is not None
    assert given["bias"].grad is not None
    given = problem()
    given["states"].requires_grad_(False)
    scored(given)[0].sum().backward()
    assert given["states"].grad is None
    assert given["weight"].grad is not None


@pytest.mark.parametrize("rows", [3, TOKENS])
def test_a_loss_of_the_entropy_alone_and_a_second_backward(rows: int) -> None:
    given = problem()
    wanted = gradients(given, naive(given, Distribution())[1].sum())
    entropies = scored(given, entropy="gradient", chunk_elements=rows * VOCABULARY)[1]
    for _ in range(2):
        inputs = [given[key] for key in wanted]
        got = torch.autograd.grad(entropies.sum(), inputs, retain_graph=True)
        for found, gradient in zip(got, wanted.values(), strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)


def test_half_precision_rounds_the_factors_and_not_the_result() -> None:
    """float32 weights (the master copy) with bfloat16 states, as under autocast."""
    given = problem(torch.float32)
    given["states"] = given["states"].detach().bfloat16().requires_grad_(True)
    exact = {key: None if value is None else value.detach() for key, value in given.items()}
    exact["weight"] = exact["weight"].bfloat16().double().requires_grad_(True)
    exact["states"] = exact["states"].double().requires_grad_(True)
    exact["bias"] = exact["bias"].double().requires_grad_(True)
    logprobs, entropies = naive(exact, Distribution(temperature=0.8))
    found = scored(given, distribution=Distribution(temperature=0.8), chunk_elements=60)
    torch.testing.assert_close(found[0].double(), logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[1].double(), entropies, rtol=1e-6, atol=2e-6)
    wanted, got = gradients(exact, logprobs.sum()), gradients(given, found[0].sum())
    assert got["weight"].dtype == torch.float32
    assert got["states"].dtype == torch.bfloat16
    for key, limit in {"weight": 1e-6, "bias": 1e-6, "states": 4e-3}.items():
        assert (got[key] - wanted[key]).norm() / wanted[key].norm() < limit, key


def test_autocast_around_it_changes_nothing() -> None:
    given = problem(torch.float32)
    wanted = scored(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scored(given)
        got = gradients(given, found[0].sum())
    assert torch.equal(found[0], wanted[0])
    for key, gradient in gradients(given, wanted[0].sum()).items():
        assert torch.equal(got[key], gradient)


def test_no_tokens() -> None:
    given = problem()
    given["states"] = given["states"].detach()[:0].requires_grad_(True)
    given["tokens"] = given["tokens"][:0]
    found = scored(given, entropy="gradient")
    assert found[0].shape == found[1].shape == (0,)
    assert all((gradient == 0).all() for gradient in gradients(given, found[0].sum()).values())


def peak(count: int, vocabulary: int, *, rows: int) -> int:
    """The most memory that scoring ``count`` tokens takes, forward and backward, beyond inputs."""
    states = torch.randn(count, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    tokens = torch.zeros(count, dtype=torch.long)

    def work() -> None:
        logprobs, entropies = token_scores(
            states, tokens, weight=weight, entropy="gradient", chunk_elements=rows * vocabulary
        )
        (logprobs + entropies).sum().backward()

    return peak_bytes(work)


def test_the_peak_is_a_few_chunks_whatever_the_length() -> None:
    """16 rows of 50,000 at a time: four buffers of 3.2 MB at most, never the whole."""
    chunk, weight = 4 * 16 * 50_000, 4 * 4 * 50_000
    short, long = (peak(count, 50_000, rows=16) for count in (64, 512))
    assert short < 4 * chunk + weight
    assert long - short < 512 * 4 * 32  # what grows is a few numbers a token, and its states
    assert long < 512 * 50_000 * 4 / 6


def test_every_device_has_a_chunk() -> None:
    gpu = torch.device("cuda:1")
    assert chunk_elements_for(torch.device("cpu")) < chunk_elements_for(gpu, memory=8 * 2**30)
    assert chunk_elements_for(gpu, memory=8 * 2**30) < chunk_elements_for(gpu, memory=139 * 2**30)
    assert kept_elements_for(gpu, memory=139 * 2**30) > chunk_elements_for(gpu, memory=139 * 2**30)


@pytest.mark.gpu
@pytest.mark.parametrize("entropy", ["value", "gradient"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_gpu_agrees_in_half_precision(name: str, entropy: str) -> None:
    """bfloat16 factors, float32 logits and float32 gradients of the master weights."""
    given = {
        key: None if value is None else value.detach().cuda()
        for key, value in problem(torch.float32).items()
    }
    given["states"] = given["states"].bfloat16()
    exact = dict(given, weight=given["weight"].bfloat16())
    for key in ("states", "weight", "bias"):
        exact[key] = exact[key].double().cpu().requires_grad_(True)
        given[key].requires_grad_(True)
    exact["tokens"] = exact["tokens"].cpu()
    share = 0.7 if entropy == "gradient" else 0.0
    logprobs, entropies = naive(exact, DISTRIBUTIONS[name])
    wanted = gradients(exact, (logprobs + share * entropies).sum())
    for rows in (4, TOKENS):
        found = scored(
            given,
            distribution=DISTRIBUTIONS[name],
            entropy=entropy,
            chunk_elements=rows * VOCABULARY,
        )
        torch.testing.assert_close(found[0].double().cpu(), logprobs, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(found[1].double().cpu(), entropies, rtol=2e-6, atol=4e-6)
        got = gradients(given, (found[0] + share * found[1]).sum())
        assert got["weight"].dtype == torch.float32
        for key, gradient in wanted.items():
            assert (got[key].cpu() - gradient).norm() / gradient.norm() < 1e-2, key
