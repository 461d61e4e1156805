"""Clip-Cov and KL-Cov: which tokens are picked, and what becomes of them."""

import dataclasses
import functools
import math
import struct

import pytest
import torch
from algorithms.batches import chosen, close, moved, ready, refuses, spoiled, wide, widened
from torch import Tensor

from posttrain.algorithms import weights
from posttrain.algorithms.losses import clip_cov, clipped, kl_cov, unclipped
from posttrain.algorithms.losses.covariance import Choice, drawn, highest
from posttrain.algorithms.pieces import for_batch
from posttrain.types import Batch

ORDER = torch.tensor([5, 11, 0, 7, 2, 9, 1, 4, 10, 3, 8, 6])
ALWAYS = 2**63 - 1
GOLDEN = 11400714819323198485  # 2^64 / golden ratio


def by_hand() -> Batch:
    """Five sequences of one token: A = −2, 1, 1, 4, −4 has mean 0.

    log π_old = −5, −1, −2, −3, −4 has mean −3.
    cov = (A − 0)(log π_old + 3) = (−2)(−2), (1)(2), (1)(1), (4)(0), (−4)(−1) = 4, 2, 1, 0, 4.
    """
    return Batch.from_rewards([0.0] * 5).replace(
        advantages=torch.tensor([-2.0, 1.0, 1.0, 4.0, -4.0], dtype=torch.float64)[:, None],
        old_logprobs=torch.tensor([-5.0, -1.0, -2.0, -3.0, -4.0], dtype=torch.float64)[:, None],
    )


def covariances(batch: Batch) -> dict[tuple[int, int], float]:
    """``(A − mean A)(log π_old − mean log π_old)`` of every active token, by plain loops."""
    places = [(row, column) for row in range(len(batch.tokens)) for column in chosen(batch, row)]
    gains = {place: float(batch.need("advantages")[place]) for place in places}
    olds = {place: float(batch.need("old_logprobs")[place]) for place in places}
    gain, old = math.fsum(gains.values()) / len(places), math.fsum(olds.values()) / len(places)
    return {place: (gains[place] - gain) * (olds[place] - old) for place in places}


def marked(batch: Batch, places: list[tuple[int, int]]) -> Tensor:
    result = torch.zeros_like(batch.mask)
    for place in places:
        result[place] = True
    return result


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1e-4, [0, 0, 0, 0, 1]),  # one token at least, and of the two equals the lower draw
        (0.39, [0, 0, 0, 0, 1]),  # ⌊1.95⌋ = 1
        (0.4, [1, 0, 0, 0, 1]),
        (0.6, [1, 1, 0, 0, 1]),
        (0.8, [1, 1, 1, 0, 1]),
        (1.0, [1, 1, 1, 0, 1]),  # never a token without covariance
    ],
)
def test_the_highest_covariances_by_hand(share: float, expected: list[int]) -> None:
    batch = by_hand()
    assert highest(batch, share=share).tokens(batch)[:, 0].int().tolist() == expected
    close(highest(batch, share=share).covariance(batch)[:, 0], [4.0, 2.0, 1.0, 0.0, 4.0], rtol=0)
    assert draw_of(batch, (4, 0), 4.0) < draw_of(batch, (0, 0), 4.0)


def test_what_is_known_of_the_whole_batch() -> None:
    batch = by_hand()
    assert highest(batch, share=0.6) == Choice(
        mean_advantage=0.0,
        mean_logprob=-3.0,
        low=2.0,
        high=math.inf,
        sure=2.0,
        last_draw=draw_of(batch, (1, 0), 2.0),
    )
    found = drawn(batch, share=1.0, low=0.5, high=3.0)
    assert dataclasses.replace(found, last_draw=0) == Choice(
        mean_advantage=0.0, mean_logprob=-3.0, low=0.5, high=3.0, sure=math.inf, last_draw=0
    )
    nothing = drawn(batch, share=1.0, low=9.0, high=9.0)
    assert (nothing.sure, nothing.last_draw) == (math.inf, ALWAYS)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6])
def test_the_highest_covariances_by_loops(share: float) -> None:
    batch = ready()
    known = covariances(batch)
    count = max(1, math.floor(share * len(known)))
    ranked = sorted((place for place in known if known[place] > 0), key=lambda place: -known[place])
    assert torch.equal(highest(batch, share=share).tokens(batch), marked(batch, ranked[:count]))


def bits_of(number: float) -> int:
    (bits,) = struct.unpack("<Q", struct.pack("<d", number))
    return bits


def mixed(bits: int) -> int:
    """The high half over the low one, times 2^64 / golden ratio; twice."""
    bits %= 2**64
    once = (bits ^ (bits >> 32)) * GOLDEN % 2**64
    return (once ^ (once >> 32)) * GOLDEN % 2**64


def draw_of(batch: Batch, place: tuple[int, int], covariance: float) -> int:
    """The hash of a token by a loop over its sequence: a signed number of 64 bits."""
    row, last = place
    so_far = position = 0
    for column in range(last + 1):
        own = bool(batch.active[row, column])
        if not (own if batch.attention is None else batch.attention[row, column]):
            continue
        position += 1
        old = bits_of(float(batch.need("old_logprobs")[row, column])) if own else 0
        so_far += mixed(mixed(mixed(old) + int(batch.tokens[row, column])) + position)
    draw = mixed(mixed(bits_of(covariance)) + so_far)
    return draw - 2**64 if draw >= 2**63 else draw


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.5])
@pytest.mark.parametrize(("low", "high"), [(0.1, 2.0), (-1.0, 0.2), (0.3, 0.31)])
def test_the_draw_by_loops(share: float, low: float, high: float) -> None:
    batch = ready()
    choice = drawn(batch, share=share, low=low, high=high)
    known = choice.covariance(batch)
    for place, value in covariances(batch).items():
        assert float(known[place]) == pytest.approx(value, rel=1e-12)
    inside = [place for place in covariances(batch) if low <= float(known[place]) <= high]
    count = max(1, math.floor(share * int(batch.active.sum())))
    lot = sorted(inside, key=lambda place: draw_of(batch, place, float(known[place])))
    assert torch.equal(choice.tokens(batch), marked(batch, lot[:count]))


def few_values(seed: int, *, zeros: float = 0.5) -> Batch:
    """64 answers of 100 tokens: one of 8 is right, and about half of the log-probs are exactly 0.

    Right has A = √7, wrong −1/√7 (a group's mean is ⅛, its deviation √7/8): two values in all.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(64, 100, generator=generator)
    old = old.masked_fill(torch.rand(64, 100, generator=generator) < zeros, 0.0)
    gains = torch.where(torch.arange(64) % 8 == seed % 8, 7**0.5, -(7**-0.5))
    return Batch(
        tokens=torch.randint(50, (64, 100), generator=generator),
        mask=torch.ones(64, 100, dtype=torch.bool),
        advantages=gains[:, None].expand(64, 100).contiguous(),
        old_logprobs=old,
    )


@pytest.mark.parametrize(
    ("share", "count"), [(2e-4, 1), (4.7e-4, 3), (0.01, 64)]
)  # of 6,400 tokens: ⌊1.28⌋, ⌊3.008⌋, 64
@pytest.mark.parametrize("zeros", [0.4, 0.6])
def test_equal_covariances_do_not_swell_the_share(share: float, count: int, zeros: float) -> None:
    """The highest is that of a right answer's certain tokens, some 400 of them with the same."""
    for seed in range(10):
        batch = few_values(seed, zeros=zeros)
        choice = highest(batch, share=share)
        covariance, tokens = choice.covariance(batch), choice.tokens(batch)
        best = (batch.need("advantages") > 0) & (batch.need("old_logprobs") == 0)
        assert int(best.sum()) > 200
        assert len(covariance[best].unique()) == 1
        assert int(tokens.sum()) == count
        assert bool(best[tokens].all())
        level = float(covariance[best][0])
        assert int(drawn(batch, share=share, low=level, high=level).tokens(batch).sum()) == count
        assert torch.equal(drawn(batch, share=share, low=level, high=level).tokens(batch), tokens)


def test_by_default_one_token_of_5000_is_treated_apart() -> None:
    """⌊2e-4 · 6400⌋ = 1, whichever of the two losses."""
    batch = few_values(1)
    for loss in (kl_cov, functools.partial(clip_cov, covariance_low=0.1)):
        assert int(loss(batch.need("old_logprobs"), batch).means["chosen"].sum()) == 1


def test_the_equals_are_drawn_by_loops() -> None:
    """Where three of the equals fit, those with the lowest hashes; whatever is above needs none."""
    batch = few_values(3)
    choice = highest(batch, share=4.7e-4)
    best = (batch.need("advantages") > 0) & (batch.need("old_logprobs") == 0)
    places = [(row, column) for row, column in best.nonzero().tolist()]
    level = float(choice.covariance(batch)[places[0]])
    lot = sorted(places, key=lambda place: draw_of(batch, place, level))
    assert torch.equal(choice.tokens(batch), marked(batch, lot[:3]))
    places_and_more = highest(batch, share=(len(places) + 1) / 6400 + 1e-9)
    found = places_and_more.tokens(batch)
    assert bool(found[best].all())
    assert int(found.sum()) == len(places) + 1


def test_the_draw_of_equals_spreads_over_answers_and_places() -> None:
    """In 200 batches each of the 8 right answers, and each tenth of an answer, has its turn.

    Fair draws would leave one of the ten out with a chance of 10 · 0.9²⁰⁰ < 10⁻⁸.
    """
    answers, tenths = set(), set()
    for seed in range(200):
        batch = few_values(8 * seed)
        [(row, column)] = highest(batch, share=2e-4).tokens(batch).nonzero().tolist()
        answers.add(row)
        tenths.add(column // 10)
    assert answers == set(range(0, 64, 8))
    assert tenths == set(range(10))


def alike(**changes: object) -> Batch:
    """Two sequences of a prompt token and two answered ones, and a third that is the opposite.

    A = 1, 1, −2 and log π_old = 0, 0, −3 have means 0 and −1: cov = 1 four times, and 4 twice.
    """
    gains = torch.tensor([[1.0], [1.0], [-2.0]], dtype=torch.float64)
    old = torch.tensor([[0.0], [0.0], [-3.0]], dtype=torch.float64)
    batch = Batch(
        tokens=torch.tensor([[4, 2, 3], [4, 2, 3], [4, 2, 3]]),
        mask=torch.tensor([[False, True, True]] * 3),
        attention=torch.ones(3, 3, dtype=torch.bool),
        advantages=gains.expand(3, 3).contiguous(),
        old_logprobs=old.expand(3, 3).contiguous(),
    )
    return batch.replace(**changes)


def test_tokens_that_are_wholly_alike_are_chosen_together() -> None:
    """Cut at one of the four with cov = 1: the twins of a place have one draw, and come both."""
    batch = alike()
    assert highest(batch, share=0.5).covariance(batch)[:, 1].tolist() == [1.0, 1.0, 4.0]
    found = highest(batch, share=0.5).tokens(batch)  # ⌊0.5 · 6⌋ = 3, of which two are the third's
    assert found[2].tolist() == [False, True, True]
    assert torch.equal(found[0], found[1])
    assert int(found[0].sum()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": torch.tensor([[4, 2, 3], [5, 2, 3], [4, 2, 3]])},  # another prompt
        {"tokens": torch.tensor([[4, 2, 3], [4, 1, 3], [4, 2, 3]])},  # another answer
        {"tokens": torch.tensor([[4, 2, 3], [4, 3, 2], [4, 2, 3]])},  # in another order
    ],
)
def test_one_difference_sets_tokens_apart(changes: dict[str, Tensor]) -> None:
    batch = alike(**changes)
    found = highest(batch, share=0.5).tokens(batch)
    assert int(found.sum()) == 3
    every = [draw_of(batch, (row, column), 1.0) for row in (0, 1) for column in (1, 2)]
    assert len(set(every)) == 4


def test_a_log_prob_before_a_token_sets_it_apart() -> None:
    """The covariance of the last token is the same, and so are all tokens: the way there is not."""
    old = torch.tensor([[0.0, 0.0, 0.0], [0.0, -0.5, 0.0], [0.0, -3.0, -2.5]], dtype=torch.float64)
    batch = alike(old_logprobs=old)  # of the six: mean −1
    chosen_one = drawn(batch, share=0.2, low=1.0, high=1.0)  # ⌊1.2⌋ of three with cov = 1
    assert chosen_one.covariance(batch)[:2, 1:].tolist() == [[1.0, 1.0], [0.5, 1.0]]
    assert int(chosen_one.tokens(batch).sum()) == 1
    last = [draw_of(batch, (row, 2), 1.0) for row in (0, 1)]
    assert len(set(last)) == 2


def test_equals_are_the_same_in_any_part_order_and_padding() -> None:
    batch = few_values(5).replace(attention=torch.ones(64, 100, dtype=torch.bool))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for choose in (
        functools.partial(highest, share=0.01),
        functools.partial(drawn, share=0.01, low=0.1, high=2.0),
    ):
        wanted = choose(batch)
        tokens = wanted.tokens(batch)
        assert int(tokens.sum()) == 64
        assert choose(batch.select(order)) == wanted
        padded = widened(batch, left=3, right=2)
        assert choose(padded) == wanted
        assert torch.equal(wanted.tokens(padded), wide(tokens, 3, 2))
        for rows in order.split(7):
            assert torch.equal(wanted.tokens(batch.select(rows)), tokens[rows])


def test_the_ends_of_the_range_are_inside() -> None:
    batch = by_hand()
    found = drawn(batch, share=1.0, low=1.0, high=2.0).tokens(batch)
    assert found[:, 0].int().tolist() == [0, 1, 1, 0, 0]
    assert not drawn(batch, share=1.0, low=4.5, high=9.0).tokens(batch).any()


def test_the_draw_is_fair() -> None:
    """10,000 covariances spread over [1, 5]: a tenth of them is drawn, from everywhere alike."""
    spread = torch.linspace(1.0, 5.0, 10_000, dtype=torch.float64)
    batch = Batch.from_rewards([0.0] * 20_000).replace(  # (±1)(±c): the means are 0
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10_000)[:, None],
        old_logprobs=torch.stack([spread, -spread], dim=1).reshape(-1, 1),
    )
    found = drawn(batch, share=0.1, low=1.0, high=5.0)
    tokens = found.tokens(batch)[:, 0].reshape(-1, 2)
    assert int(tokens.sum()) == 2000
    for part in tokens.reshape(10, 2000):
        assert int(part.sum()) == pytest.approx(200, abs=40)  # three deviations of a fair draw
    for side in tokens.T:
        assert int(side.sum()) == pytest.approx(1000, abs=90)
    assert int(tokens.all(dim=1).sum()) == pytest.approx(100, abs=30)  # both of a pair: 1 of 100


@pytest.mark.parametrize("gain", [0.0, 0.7])
def test_without_a_difference_no_token_is_picked(gain: float) -> None:
    """Equal advantages have covariance exactly 0, whatever rounding does to their mean."""
    batch = ready().replace(advantages=torch.full((12, 10), gain, dtype=torch.float64))
    assert not highest(batch, share=1.0).tokens(batch).any()
    same = ready().replace(old_logprobs=torch.full((12, 10), -0.7, dtype=torch.float64))
    assert not highest(same, share=1.0).tokens(same).any()


def test_without_a_token_none_is_picked() -> None:
    batch = ready().replace(valid=torch.zeros(12, dtype=torch.bool))
    batch = spoiled(batch, math.nan)
    nothing = highest(batch, share=1.0)
    assert nothing == Choice(mean_advantage=0.0, mean_logprob=0.0, low=math.inf)
    assert not nothing.tokens(batch).any()
    assert not drawn(batch, share=1.0, low=-9.0, high=9.0).tokens(batch).any()


@pytest.mark.parametrize(
    "choose",
    [
        functools.partial(highest, share=0.2),
        functools.partial(drawn, share=0.1, low=0.05, high=3.0),
    ],
    ids=["highest", "drawn"],
)
def test_neither_order_nor_padding_nor_garbage_nor_precision_changes_the_choice(
    choose: object,
) -> None:
    batch = ready()
    wanted, tokens = choose(batch), choose(batch).tokens(batch)
    assert 2 < int(tokens.sum()) < 13
    assert choose(batch.select(ORDER)) == wanted
    assert choose(spoiled(batch, math.nan)) == wanted
    assert torch.equal(wanted.tokens(spoiled(batch, math.inf)), tokens)
    padded = widened(batch, left=2, right=3)
    assert choose(padded) == wanted
    assert torch.equal(wanted.tokens(padded), wide(tokens, 2, 3))
    for rows in torch.arange(12).split(5):
        assert torch.equal(wanted.tokens(batch.select(rows)), tokens[rows])
    half = batch.replace(
        advantages=batch.need("advantages").float(), old_logprobs=batch.need("old_logprobs").float()
    )
    assert choose(half).covariance(half).dtype == torch.float64


@pytest.mark.parametrize("field", ["advantages", "old_logprobs"])
def test_numbers_that_are_none_are_refused(field: str) -> None:
    batch = ready()
    worse = batch.need(field).clone()
    worse[0, 2] = math.nan
    with refuses(
        f"{field}: nan at [0, 2] (1 in all); mark what could not be scored in `valid` instead of "
        "passing NaN or infinity on"
    ):
        highest(batch.replace(**{field: worse}), share=0.1)


def gradient(loss: Tensor, by: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), by)
    return result


def test_kl_cov_by_hand() -> None:
    """Picked are the first and the last; all moved by 0.1, −0.2, 0.3, 0.4, −0.5, and β = 0.3.

    ℓ = −ρA, and +0.3 |log ρ| for the two: 2 e^0.1 + 0.03 and 4 e^−0.5 + 0.15. The derivative by
    log π is −ρA, and ±0.3 more: + for a token that went up, − for one that went down.
    """
    batch, steps = by_hand(), [0.1, -0.2, 0.3, 0.4, -0.5]
    moves = torch.tensor(steps, dtype=torch.float64)[:, None]
    logprobs = (batch.need("old_logprobs") + moves).requires_grad_()
    terms = kl_cov(logprobs, batch, share=0.4, coefficient=0.3)
    plain = [
        2 * math.exp(0.1),
        -math.exp(-0.2),
        -math.exp(0.3),
        -4 * math.exp(0.4),
        4 * math.exp(-0.5),
    ]
    extra, push = [0.03, 0.0, 0.0, 0.0, 0.15], [0.3, 0.0, 0.0, 0.0, -0.3]
    close(terms.loss.detach()[:, 0], [a + b for a, b in zip(plain, extra, strict=True)])
    close(terms.loss.detach()[[0, 4], 0], [2.24034184, 2.57612264], rtol=1e-8)
    close(gradient(terms.loss, logprobs)[:, 0], [a + b for a, b in zip(plain, push, strict=True)])
    close(terms.means["chosen"][:, 0], [1.0, 0.0, 0.0, 0.0, 1.0], rtol=0)


def test_clip_cov_by_hand() -> None:
    """Of cov 4, 2, 1, 0, 4 those in [1.5, 3] are the second alone: it has no loss; the others are
    PPO's: A = −2 at ρ = 0.7 and A = 4 at ρ = 1.5 are stopped at 0.8 and 1.2."""
    batch = by_hand()
    ratios = torch.tensor([0.7, 1.1, 1.1, 1.5, 1.1], dtype=torch.float64)[:, None]
    logprobs = (batch.need("old_logprobs") + ratios.log()).requires_grad_()
    terms = clip_cov(logprobs, batch, covariance_low=1.5, covariance_high=3.0)
    close(terms.loss.detach()[:, 0], [2 * 0.8, 0.0, -1.1, -4 * 1.2, 4 * 1.1])
    close(gradient(terms.loss, logprobs)[:, 0], [0.0, 0.0, -1.1, 0.0, 4.4])
    close(terms.means["chosen"][:, 0], [0.0, 1.0, 0.0, 0.0, 0.0], rtol=0)
    close(terms.means["clip_low"][:, 0], [1.0, 0.0, 0.0, 0.0, 0.0], rtol=0)
    close(terms.means["clip_high"][:, 0], [0.0, 0.0, 0.0, 1.0, 0.0], rtol=0)


def test_clip_cov_by_default_draws_from_one_to_five() -> None:
    """1.3 times A has covariances 5.2, 2.6, 1.3, 0, 5.2; half of A has 2, 1, ½, 0, 2."""
    for scale, expected in ((1.3, [0, 1, 1, 0, 0]), (0.5, [1, 1, 0, 0, 1])):
        batch = by_hand().replace(advantages=scale * by_hand().need("advantages"))
        terms = clip_cov(batch.need("old_logprobs"), batch, share=1.0)
        assert terms.means["chosen"][:, 0].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"share": 0.3, "coefficient": 0.4}])
def test_kl_cov_is_importance_sampling_and_a_pull_on_the_highest(options: dict[str, float]) -> None:
    batch = ready()
    logprobs = moved(batch).requires_grad_()
    terms, plain = kl_cov(logprobs, batch, **options), unclipped(logprobs, batch)
    picked = highest(batch, share=options.get("share", 2e-4)).tokens(batch)
    step = (logprobs - batch.need("old_logprobs")).abs() * options.get("coefficient", 1.0)
    close(terms.loss.detach(), (plain.loss + torch.where(picked, step, 0.0)).detach())
    wanted = plain.loss + torch.where(picked, step, 0.0)
    close(gradient(terms.loss, logprobs), gradient(wanted, logprobs))
    assert list(terms.means) == [*plain.means, "chosen"]
    for name in plain.means:
        close(terms.means[name], plain.means[name], rtol=0)
    close(terms.means["chosen"], picked.double(), rtol=0)
    close(terms.maxima["ratio"], plain.maxima["ratio"], rtol=0)


CLIP_COV = {
    "share": 0.1,
    "covariance_low": 0.05,
    "covariance_high": 3.0,
    "clip_low": 0.1,
    "clip_high": 0.3,
}


@pytest.mark.parametrize("options", [{}, CLIP_COV])
def test_clip_cov_is_the_clip_without_the_drawn(options: dict[str, float]) -> None:
    batch = ready()
    logprobs = moved(batch).requires_grad_()
    clip = {name: options[name] for name in ("clip_low", "clip_high") if name in options}
    terms, plain = clip_cov(logprobs, batch, **options), clipped(logprobs, batch, **clip)
    drawing = {"share": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0, **options}
    picked = drawn(
        batch,
        share=drawing["share"],
        low=drawing["covariance_low"],
        high=drawing["covariance_high"],
    ).tokens(batch)
    assert picked.any()
    close(terms.loss.detach(), plain.loss.detach() * ~picked)
    close(gradient(terms.loss, logprobs), gradient(plain.loss * ~picked, logprobs))
    assert list(terms.means) == [*plain.means, "chosen"]
    for name in plain.means:
        close(terms.means[name], plain.means[name], rtol=0)
    close(terms.means["chosen"], picked.double(), rtol=0)


def test_on_fresh_data_clip_cov_has_the_naive_gradient_but_for_the_drawn() -> None:
    batch = weights.token_mean(ready())
    logprobs = batch.need("old_logprobs").clone().requires_grad_()
    terms = clip_cov(logprobs, batch)
    found = gradient(terms.loss * batch.need("weights"), logprobs)
    kept = batch.active & (terms.means["chosen"] == 0)
    assert int(batch.active.sum() - kept.sum()) == 1
    close(found, -batch.need("weights") * batch.need("advantages") * kept)


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(kl_cov, share=0.2),
        functools.partial(clip_cov, share=0.1, covariance_low=0.05),
    ],
    ids=["kl_cov", "clip_cov"],
)
def test_any_parts_of_a_batch_add_up_to_the_whole(loss: object) -> None:
    """Many tokens are picked; a loss that picked in each part would pick others."""
    batch = weights.token_mean(ready())
    logprobs = moved(batch).requires_grad_()
    whole = loss(logprobs, batch)
    wanted = gradient(weights.total(whole.loss, batch), logprobs)
    made = for_batch(loss, batch)
    for size in (1, 3, 5):
        found, separate = torch.zeros(2, 12, 10, dtype=torch.float64)
        for rows in torch.arange(12).split(size):
            part = batch.select(rows)
            found += gradient(weights.total(made(logprobs[rows], part).loss, part), logprobs)
            alone = weights.total(loss(logprobs[rows], part).loss, part)
            separate += gradient(alone, logprobs)
        close(found, wanted)
        assert float((separate - wanted).abs().max()) > 1e-3
