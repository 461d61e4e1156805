"""filter_logits and sample: hand-derived sets, exact frequencies, and the edges of the CDF."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.models.sampling import filter_logits, sample
from posttrain.types import Sampling

INFINITY = float("inf")


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def kept(logits: torch.Tensor, **options: float) -> list[int]:
    return torch.isfinite(filter_logits(logits, **options))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [1]),  # always at least one
        ({"top_p": 1e-300}, [1]),  # a number that float32 does not know either
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        ({"top_p": 0.99}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # among the two left: 4/7 = 0.571 and 3/7
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
    ],
)
def test_filters_keep_the_sets_worked_out_by_hand(
    options: dict[str, float], expected: list[int]
) -> None:
    assert kept(logits_of(0.2, 0.4, 0.1, 0.3), **options) == expected


def test_a_temperature_by_which_logits_would_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature: must be 0 \(greedy\), or at least 1e-6"):
        Sampling(temperature=1e-300)
    tokens, logprobs = sample(
        logits_of(0.2, 0.8).float(), torch.tensor([0.1]), sampling=Sampling(temperature=1e-6)
    )
    assert (tokens.item(), logprobs.item()) == (1, 0.0)


def test_equal_logits_are_cut_by_token_id() -> None:
    flat = torch.zeros(1, 8)
    assert kept(flat, top_k=3) == [0, 1, 2]
    assert kept(flat, top_p=0.5) == [0, 1, 2, 3]
    assert kept(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), top_k=3) == [0, 1, 3]


def test_rows_are_cut_independently_and_values_kept_exactly() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [2.0, 2.1, -INFINITY]])
    found = filter_logits(logits, top_p=0.9)
    expected = [[-INFINITY, 5.0, -INFINITY], [2.0, 2.1, -INFINITY]]
    assert torch.equal(found, torch.tensor(expected))
    assert filter_logits(logits) is logits


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
)
@example(
    values=[0.0, 2.3125, 3.78125, 3.78125, 4.375, -7.015625, -7.0234375], top_k=0, top_p=0.99999
)
def test_the_kept_set_is_the_smallest_that_reaches_top_p(
    values: list[float], top_k: int, top_p: float
) -> None:
    logits = torch.tensor([values], dtype=torch.float64)
    chosen = kept(logits, top_k=top_k, top_p=top_p)
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    pool = ranked[: top_k or None]
    assert chosen == sorted(ranked[: len(chosen)])  # likeliest first, ties by id
    assert 1 <= len(chosen) <= len(pool)
    mass = dict(zip(pool, logits[0, pool].softmax(-1).tolist(), strict=True))
    if top_p < 1:
        assert sum(mass[token] for token in chosen) >= top_p - 1e-12
        assert sum(mass[token] for token in ranked[: len(chosen) - 1]) < top_p + 1e-12


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(temperature=0.5), [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.79), [2 / 9, 4 / 9, 0, 3 / 9]),
        (Sampling(temperature=0.5, top_k=3, top_p=0.8), [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_truncated_distribution(
    sampling: Sampling, expected: list[float]
) -> None:
    count = 9_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # every quantile once
    logits = logits_of(0.2, 0.4, 0.1, 0.3).expand(count, -1)
    tokens, logprobs = sample(logits, uniforms, sampling=sampling)
    target = torch.tensor(expected, dtype=torch.float64)
    frequency = tokens.bincount(minlength=4) / count
    torch.testing.assert_close(frequency, target, rtol=0, atol=1.5 / count, check_dtype=False)
    torch.testing.assert_close(logprobs.exp(), target[tokens], rtol=1e-12, atol=0)


def test_greedy_takes_the_likeliest_and_reports_the_models_own_logprob() -> None:
    sampling = Sampling(temperature=0.0, top_k=1)
    tokens, logprobs = sample(logits_of(0.2, 0.5, 0.3), torch.tensor([0.99]), sampling=sampling)
    assert tokens.tolist() == [1]
    assert logprobs.exp().item() == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_an_impossible_token_is_never_drawn(uniform: float, dtype: torch.dtype) -> None:
    row = [-INFINITY, 0.0, -INFINITY, -200.0, 1.0, -INFINITY, -INFINITY]
    logits = torch.tensor([row] * 3, dtype=dtype)
    uniforms = torch.full((3,), uniform)
    tokens, logprobs = sample(logits, uniforms, sampling=Sampling())
    assert set(tokens.tolist()) <= {1, 4}
    assert tokens[0] == (1 if uniform == 0.0 else 4)
    assert torch.isfinite(logprobs).all()


def test_a_large_vocabulary_is_drawn_to_its_last_token() -> None:
    size = 200_000  # in float32 the cumulative sum of these ends at 0.99…
    uniforms = torch.tensor([0.0, 0.25, 1 - 2**-24])
    tokens, logprobs = sample(torch.zeros(3, size), uniforms, sampling=Sampling())
    assert tokens.tolist() == [0, size // 4, size - 1]
    torch.testing.assert_close(logprobs, torch.full((3,), -12.206072645530174))


def test_a_rare_token_is_drawn_as_often_as_it_should_be() -> None:
    logits = logits_of(1 - 1e-9, 1e-9).expand(2, -1)
    uniforms = torch.tensor([1 - 1.1e-9, 1 - 0.9e-9], dtype=torch.float64)
    tokens, _ = sample(logits, uniforms, sampling=Sampling())
    assert tokens.tolist() == [0, 1]


def test_half_precision_logits_are_widened_before_anything_else() -> None:
    logits = torch.tensor([[20.0, 19.0]], dtype=torch.bfloat16)
    _, logprobs = sample(logits, torch.tensor([0.0]), sampling=Sampling(temperature=0.7))
    expected = torch.tensor([20.0, 19.0]).div(0.7).log_softmax(-1)[0]
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_diverged_model_shows_in_the_logprob() -> None:
    _, logprobs = sample(
        torch.tensor([[float("nan"), 0.0]]), torch.tensor([0.5]), sampling=Sampling()
    )
    assert logprobs.isnan().all()
