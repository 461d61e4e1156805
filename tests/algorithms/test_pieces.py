"""What pieces declare of themselves: believed where it is said, and not assumed where it is not."""

import functools
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import close, moved, ragged, ready
from algorithms.recipes import ADVANTAGE_VARIANTS

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES, clipped
from posttrain.algorithms.pieces import Facts, Loss, centred_over, facts, for_batch, piece
from posttrain.types import Batch, Terms

CLAIM = [name for name, loss in POLICY_LOSSES.items() if facts(loss).zero_with_advantage]


def test_which_losses_claim_to_be_zero_with_the_advantage() -> None:
    assert set(POLICY_LOSSES) - set(CLAIM) == {"penalised", "kl_cov", "teacher_divergence"}


@pytest.mark.parametrize("scale", [0.1, 2.0])
@pytest.mark.parametrize("name", CLAIM)
def test_the_claim_holds(name: str, scale: float) -> None:
    """Term and gradient are exactly 0 where A = 0, whatever the ratio and the other tokens' A."""
    for seed in range(20):
        batch = ready(seed)
        silent = (torch.arange(120).reshape(12, 10) + seed) % 3 == 0
        silent[seed % 12] = True  # whole sequences too
        batch = batch.replace(advantages=batch.need("advantages").masked_fill(silent, 0.0))
        logprobs = moved(batch, seed, scale=scale).requires_grad_()
        loss = POLICY_LOSSES[name](logprobs, batch).loss
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert not loss[silent].any()
        assert not gradient[silent].any()
        assert gradient[~silent & batch.active].any()


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - set(CLAIM)))
def test_the_others_have_no_right_to_it(name: str) -> None:
    batch = ready()
    silent = torch.arange(120).reshape(12, 10) % 3 == 0
    batch = batch.replace(advantages=batch.need("advantages").masked_fill(silent, 0.0))
    options = {"share": 1.0} if name == "kl_cov" else {}
    assert POLICY_LOSSES[name](moved(batch), batch, **options).loss[silent].any()


ADVANTAGES_OF_ALL_KINDS = {**ADVANTAGE_VARIANTS, "pass_at_k": ADVANTAGES["pass_at_k"]}


@pytest.mark.parametrize("name", ADVANTAGES_OF_ALL_KINDS)
def test_advantages_are_centred_where_they_say_so_and_nowhere_else(name: str) -> None:
    """Two groups of six sequences of one token: what each group adds up to, and the whole."""
    advantage = ADVANTAGES_OF_ALL_KINDS[name]
    whole = ragged(3)
    batch = Batch.from_rewards(
        [0.1, 0.9, 0.4, 2.0, 0.3, 0.7, 5.0, 1.0, 3.0, 2.5, 0.2, 9.0], groups=[0] * 6 + [1] * 6
    )
    columns = {"token_rewards": batch.need("rewards")[:, None], "values": whole.values[:, :1]}
    batch = batch.replace(
        **columns,
        baseline=whole.baseline,
        score_norms=whole.score_norms,
        greedy_rewards=torch.zeros(12, dtype=torch.float64),
        old_logprobs=whole.old_logprobs[:, :1],
        teacher_logprobs=whole.teacher_logprobs[:, :1],
    )
    found = advantage(batch).need("advantages").reshape(2, 6)
    by_group = bool((found.sum(1).abs() < 1e-9).all())
    by_batch = bool(found.sum().abs() < 1e-9) and any(
        abs(float(found.std(unbiased=sample)) - 1) < 1e-9 for sample in (False, True)
    )
    if name == "centred, whitened":  # both are true of it; the audit asks for the stronger
        by_group = False
    expected = "group" if by_group else "batch" if by_batch else None
    if name in ("turn_group_normalised", "turns, population"):  # of one turn here, so of the group
        assert expected == "group"
        expected = "turn"
    assert centred_over(advantage) == expected


def own(logprobs: torch.Tensor, batch: Batch, *, strength: float = 0.1) -> Terms:
    """A loss of a user's own."""
    square = (logprobs - batch.need("old_logprobs")).square()
    return Terms(loss=clipped(logprobs, batch).loss + strength * square)


def test_a_loss_that_says_nothing_claims_nothing() -> None:
    assert facts(own) == Facts(zero_with_advantage=False, whole_batch=None)
    assert facts(functools.partial(own, strength=0.2)) == Facts()
    assert facts(torch.nn.Identity()) == Facts()


def test_a_claim_holds_with_options_bound() -> None:
    bound = functools.partial(functools.partial(clipped, clip_low=0.1), clip_high=0.3)
    assert facts(bound) == facts(clipped) == Facts(zero_with_advantage=True)


def test_a_wrapper_does_not_inherit_the_claim() -> None:
    """functools.wraps copies attributes, and what is wrapped around may add a term."""

    @functools.wraps(clipped)
    def around(logprobs: torch.Tensor, batch: Batch) -> Terms:
        return own(logprobs, batch)

    assert vars(around)["posttrain_piece"] == vars(clipped)["posttrain_piece"]
    assert facts(around) == Facts()
    assert facts(piece(zero_with_advantage=True)(around)).zero_with_advantage


def test_the_decorator_changes_nothing_else() -> None:
    assert piece(zero_with_advantage=True)(own) is own
    vars(own).pop("posttrain_piece")


def ranked_for(batch: Batch, *, scale: float, other: float) -> Loss:
    """A loss that must know the highest advantage of the whole batch."""
    most = float(batch.need("advantages")[batch.active].max())

    def loss(logprobs: torch.Tensor, part: Batch) -> Terms:
        return Terms(loss=-scale * part.need("advantages") / most * logprobs + other)

    return loss


@piece(whole_batch=ranked_for)
def ranked(
    logprobs: torch.Tensor, batch: Batch, *, scale: float = 2.0, other: float = 0.5
) -> Terms:
    return ranked_for(batch, scale=scale, other=other)(logprobs, batch)


@pytest.mark.parametrize(
    ("loss", "scale", "other"),
    [
        (ranked, 2.0, 0.5),
        (functools.partial(ranked, other=3.0), 2.0, 3.0),
        (functools.partial(functools.partial(ranked, scale=7.0, other=1.0), other=3.0), 7.0, 3.0),
    ],
)
def test_a_loss_is_made_from_the_whole_batch_with_its_options(
    loss: Callable[..., Terms], scale: float, other: float
) -> None:
    batch = ready()
    logprobs, most = moved(batch), batch.need("advantages")[batch.active].max()
    made = for_batch(loss, batch)
    part = batch.select(torch.tensor([3, 8]))
    expected = -scale * part.need("advantages") / most * logprobs[[3, 8]] + other
    close(made(logprobs[[3, 8]], part).loss, expected)
    assert float(part.need("advantages")[part.active].max()) < most


def test_another_loss_is_left_as_it_is() -> None:
    bound = functools.partial(clipped, clip_low=0.1)
    assert for_batch(bound, ready()) is bound
    assert for_batch(own, ready()) is own


def test_every_fact_is_kept_as_it_was_declared() -> None:
    """And what is not declared is not assumed."""

    def wanted(*, deep: bool) -> tuple[str, ...]:
        return ("values",) if deep else ()

    def whole(batch: Batch) -> Loss:
        return clipped

    def own(batch: Batch) -> Batch:
        return batch

    assert facts(piece()(own)) == Facts()
    assert Facts() == Facts(
        needs=frozenset(),
        smallest_group=1,
        centred=None,
        zero_with_advantage=False,
        optimiser_steps=None,
        whole_batch=None,
    )
    assert facts(piece(needs=["values", "values"])(own)) == Facts(needs=frozenset({"values"}))
    given = {
        "needs": wanted,
        "smallest_group": 3,
        "centred": "group",
        "zero_with_advantage": True,
        "optimiser_steps": "several",
        "whole_batch": whole,
    }
    assert facts(piece(**given)(own)) == Facts(**given)
