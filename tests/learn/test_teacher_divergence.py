"""A teacher beside the policy: what it says, and the exact gradient of a divergence from it."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from critic_parts import batch
from small_model import OPTIONS, naive_logits, naive_logprobs, parameters, small_model
from torch import Tensor, nn

from posttrain.algorithms.kl import jensen_shannon
from posttrain.algorithms.losses import teacher_divergence
from posttrain.algorithms.weights import token_mean
from posttrain.build.learners import make_teacher
from posttrain.config import recipe_from_dict, resolve
from posttrain.config.piece_facts import pieces_need
from posttrain.fast import score as fast
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models import logprobs as plain
from posttrain.models.frozen import check_teacher, fit_rows
from posttrain.models.load import Policy, load_policy
from posttrain.models.logprobs import Against
from posttrain.models.tiny import build_tokenizer
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

TEMPERATURE = 0.7
Doors = Any


def divergence_terms(outputs: Outputs, part: Batch) -> Terms:
    return teacher_divergence(outputs.need("logprobs"), part.replace(divergence=outputs.divergence))


def objective(beta: float) -> Objective:
    return Objective(divergence_terms, divergence=functools.partial(jensen_shannon, beta=beta))


def learner(teacher: nn.Module | None, **options: Any) -> LocalLearner:
    model = small_model()
    return LocalLearner(
        model,
        adamw(model, learning_rate=1e-3),
        save=lambda folder: None,
        max_gradient_norm=1e9,
        forward=functools.partial(options.pop("score", fast.score_tokens), temperature=TEMPERATURE),
        teacher=teacher,
        **options,
    )


def teacher() -> nn.Module:
    return small_model(sharpness=3.0)


def by_hand(given: Batch, beta: float) -> tuple[float, Tensor]:
    """The loss over whole logits, row by row, and its gradient."""
    model, other = small_model(), teacher()
    with torch.no_grad():
        theirs = naive_logits(other, given) / TEMPERATURE
    terms = jensen_shannon(naive_logits(model, given) / TEMPERATURE, theirs, beta=beta)
    loss = (given.need("weights") * terms)[given.mask].sum()
    loss.backward()
    return float(loss.detach()), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.usefixtures("float64_throughout")
def test_the_teacher_scores_the_policys_tokens_and_is_left_as_it_is() -> None:
    other = teacher()
    before = parameters(other)
    student = learner(other, micro_batch_tokens=7)
    seen = student.infer(batch())
    expected = naive_logprobs(teacher(), seen, temperature=TEMPERATURE).detach()
    torch.testing.assert_close(
        seen.need("teacher_logprobs")[seen.mask], expected[seen.mask], rtol=1e-12, atol=1e-12
    )
    assert not torch.equal(seen.need("teacher_logprobs"), seen.need("old_logprobs"))
    student.step(token_mean(seen), objective(0.5))
    assert torch.equal(parameters(other), before)
    assert all(weight.grad is None for weight in other.parameters())


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("tokens", "score"),
    [
        (1, fast.score_tokens),  # a sequence at a time
        (10_000, fast.score_tokens),
        (10_000, functools.partial(fast.score_tokens, chunk_elements=400)),  # two tokens at a time
        (10_000, plain.score_tokens),  # padded rows, whole logits
    ],
    ids=["micro", "whole", "chunks", "plain"],
)
def test_the_gradient_is_the_divergences_however_it_is_cut(
    beta: float, tokens: int, score: Any
) -> None:
    given = token_mean(batch())
    student = learner(teacher(), micro_batch_tokens=tokens, score=score)
    result = student.step(given, objective(beta))
    loss, wanted = by_hand(given, beta)
    found = torch.cat([weight.grad.flatten() for weight in student.model.parameters()])
    assert result.loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert wanted.norm() > 1e-3
    assert result.metrics["divergence"] > 0


@pytest.mark.usefixtures("float64_throughout")
def test_both_doors_say_the_same() -> None:
    against = Against(teacher(), functools.partial(jensen_shannon, beta=0.3))
    found = fast.score_tokens(small_model(), batch(), against=against, chunk_elements=300)
    wanted = plain.score_tokens(small_model(), batch(), against=against)
    for name in ("logprobs", "entropy", "divergence"):
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), rtol=1e-12, atol=1e-12
        )
    assert fast.score_tokens(small_model(), batch()).divergence is None


def test_without_a_teacher_there_is_no_divergence() -> None:
    with pytest.raises(ValueError, match=r"^rl.loss: it compares distributions with a teacher's"):
        learner(None).step(token_mean(batch()), objective(1.0))


def test_a_teacher_that_cannot_be_packed_is_said() -> None:
    student = learner(teacher())
    assert not student.way(64).without
    slow = learner(teacher())
    slow._teacher.get_decoder().config.sliding_window = 4
    (missing,) = slow.way(64).without
    assert "sliding_window" in missing.why


def policy(rows: int | None = None, *, tied: bool = False) -> Policy:
    """A policy whose embedding is padded to so many rows, with random numbers in the padding."""
    made = load_policy("tiny", seed=3, dtype="float64", options={**OPTIONS, "tie_embeddings": tied})
    if rows is not None:
        made.model.resize_token_embeddings(rows, mean_resizing=False)
    return made


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_padding_are_cut_off(tied: bool) -> None:
    """What sizes of one family differ by: probabilities add up to 1 over the common tokens."""
    size = len(build_tokenizer())
    larger, same = policy(size + 9, tied=tied).model, policy(size + 9, tied=tied).model
    fit_rows(larger, size)
    given = batch()
    logits = naive_logits(same, given)[..., :size]
    expected = logits.log_softmax(-1).gather(-1, given.tokens[..., None])[..., 0]
    found = naive_logprobs(larger, given)
    torch.testing.assert_close(found[given.mask], expected[given.mask], rtol=1e-12, atol=1e-12)
    whole = naive_logprobs(same, given)
    assert (found - whole)[given.mask].abs().max() > 1e-3  # the padding had its share
    assert naive_logits(larger, given).shape[-1] == size
    scores = fast.score_tokens(larger, given).need("logprobs")
    torch.testing.assert_close(scores[given.mask], expected[given.mask], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_only_the_policy_has_are_never_emitted(tied: bool) -> None:
    size = len(build_tokenizer())
    smaller, same = policy(tied=tied).model, policy(tied=tied).model
    fit_rows(smaller, size + 9)
    given = batch()
    found, expected = naive_logprobs(smaller, given), naive_logprobs(same, given)
    torch.testing.assert_close(found[given.mask], expected[given.mask], rtol=1e-12, atol=1e-12)
    strange = given.replace(tokens=given.tokens.masked_fill(given.mask, size + 4))
    never = fast.score_tokens(smaller, strange).need("logprobs")[given.mask]
    assert never.isfinite().all()
    assert never.max() < -90


def test_another_vocabulary_is_refused() -> None:
    own, other = policy(), policy()
    check_teacher(own, own)
    other.tokenizer.add_tokens(["<tool>"])
    with pytest.raises(
        ValueError,
        match=r"^teacher.model: 'tiny' has another vocabulary than the policy \(107 tokens and "
        r"106; 1 differ: '<tool>' is 106 there and missing here\), so it would score other words "
        r"than were sampled; take a teacher of the policy's own family$",
    ):
        check_teacher(other, own)
    with pytest.raises(ValueError, match=r"'<tool>' is missing there and 106 here"):
        check_teacher(own, other)


def test_a_teacher_that_ends_otherwise_is_refused() -> None:
    own = policy()
    other = Policy(own.model, own.tokenizer, source="other", end_tokens=(7,), pad_token=0)
    with pytest.raises(ValueError, match="it would teach never to end"):
        check_teacher(other, own)


def test_a_teacher_of_distributions_alone_is_not_asked_twice() -> None:
    seen = learner(teacher(), teacher_infers=False).infer(batch())
    assert seen.teacher_logprobs is None


def test_a_teacher_must_have_room_for_the_sequences() -> None:
    room = small_model().config.max_position_embeddings
    learner(teacher()).way(room)
    with pytest.raises(ValueError, match=rf"teacher\.model: its context has {room} tokens, and"):
        learner(teacher()).way(room + 1)


def distilling(algorithm: str, teacher: str = "tiny") -> Any:
    values = {"task": {"name": "arithmetic"}, "teacher": {"model": teacher}}
    return resolve(recipe_from_dict({**values, "rl": {"algorithm": algorithm, "epochs": 2}}))


def test_only_distill_has_its_teacher_score_tokens() -> None:
    asked = {
        name: "teacher_logprobs" in pieces_need(distilling(name).rl) for name in ("distill", "gkd")
    }
    assert asked == {"distill": True, "gkd": False}


def test_a_teacher_that_is_not_there_is_called_the_teacher(tmp_path: Path) -> None:
    policy = load_policy("tiny", options=OPTIONS)
    with pytest.raises(ValueError, match=r"^teacher\.model: .*none"):
        make_teacher(distilling("distill", str(tmp_path / "none")), policy, device="cpu")
