"""On fresh data every ratio is one, and every policy loss has REINFORCE's gradient."""

from collections.abc import Callable

import pytest
import torch
from algorithms.batches import close, ready
from torch import Tensor

from posttrain.algorithms import weights
from posttrain.algorithms.losses import POLICY_LOSSES, naive
from posttrain.types import Batch, Terms


def gradient(loss: Callable[..., Terms], batch: Batch, **options: float) -> Tensor:
    logprobs = batch.need("old_logprobs").clone().requires_grad_()
    total = weights.total(loss(logprobs, batch, **options).loss, batch)
    (result,) = torch.autograd.grad(total, logprobs)
    return result


# All but one that leaves tokens out (see test_covariance_losses), and a teacher's divergence.
ALL_TOKENS = [name for name in POLICY_LOSSES if name not in ("clip_cov", "teacher_divergence")]


@pytest.mark.parametrize("weighting", weights.WEIGHTS)
@pytest.mark.parametrize("name", ALL_TOKENS)
def test_every_loss_has_the_naive_gradient(name: str, weighting: str) -> None:
    batch = weights.WEIGHTS[weighting](ready())
    wanted = gradient(naive, batch)
    close(wanted, -batch.need("weights") * batch.need("advantages") * batch.active)
    close(gradient(POLICY_LOSSES[name], batch), wanted)


@pytest.mark.parametrize(
    "name", ["clipped", "dual_clip", "sequence_clipped", "geometric_mean", "cispo"]
)
def test_even_with_no_room_to_move(name: str) -> None:
    batch = weights.sequence_mean(ready())
    found = gradient(POLICY_LOSSES[name], batch, clip_low=0.0, clip_high=0.0)
    close(found, gradient(naive, batch))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_nothing_is_clipped_and_nothing_has_diverged(name: str) -> None:
    batch = ready()
    terms = POLICY_LOSSES[name](batch.need("old_logprobs"), batch)
    assert terms.means["ratio"].tolist() == batch.active.double().tolist()
    for report in ("approx_kl", "clip_low", "clip_high"):
        assert not terms.means[report].any()


@pytest.mark.parametrize("name", ALL_TOKENS)
def test_log_probs_of_the_batch_itself_still_have_a_gradient(name: str) -> None:
    """The old policy is held constant even where it is the very tensor being trained."""
    batch = weights.token_mean(ready())
    logprobs = batch.need("old_logprobs").clone().requires_grad_()
    same = batch.replace(old_logprobs=logprobs)
    loss = weights.total(POLICY_LOSSES[name](logprobs, same).loss, same)
    (found,) = torch.autograd.grad(loss, logprobs)
    close(found, gradient(naive, batch))
