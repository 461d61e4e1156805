"""The objective of DPO and its kin: a naive loop's, whatever the micro-batches; and it learns."""

import copy
import functools
import itertools
import pickle
from typing import Any

import pytest
import torch
from small_model import naive_logprobs, parameters, small_model
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from posttrain.algorithms.losses import DIRECT_LOSSES
from posttrain.algorithms.weights import total
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.direct_preference import (
    Preferences,
    batches,
    direct_terms,
    held_out,
    objective,
    reference_logprobs,
    strangers,
)
from posttrain.pipelines.fit import fit
from posttrain.pipelines.reward_model import RankedTokens
from posttrain.protocols import Outputs

OPTIONS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.5, "label_smoothing": 0.1},
    "ipo": {"beta": 0.5},
    "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "orpo": {"beta": 0.5},
    "simpo": {"beta": 2.0, "gamma": 0.5},
}


def sets(sizes: tuple[int, ...] = (2, 3, 2, 4)) -> list[RankedTokens]:
    """Ragged ranked sets, each with a prompt of its own."""
    length, found = itertools.cycle((3, 1, 4, 2, 5)), []
    for number, size in enumerate(sizes):
        prompt = (20 + number, 30)
        ends = [
            tuple(5 + (7 * number + 5 * place + n) % 12 for n in range(next(length)))
            for place in range(size)
        ]
        rows = [(*prompt, *end) for end in ends]
        found.append(RankedTokens(rows=rows, lengths=[len(e) for e in ends], start=len(prompt)))
    return found


def labelled(count: int = 7) -> list[RankedTokens]:
    """Single completions, some desirable."""
    rows = [ranked.rows[0] for ranked in sets((1,) * count)]
    return [
        RankedTokens(rows=[row], lengths=[len(row) - 2], start=2, desirable=number % 3 != 1)
        for number, row in enumerate(rows)
    ]


def learner(model: nn.Module, **options: Any) -> LocalLearner:
    given = {"micro_batch_tokens": 64, "max_gradient_norm": 1e9, "keep_groups": True, **options}
    rate = given.pop("learning_rate", 1e-3)
    return LocalLearner(model, adamw(model, learning_rate=rate), save=lambda folder: None, **given)


def prepared(name: str, asked: LocalLearner) -> Preferences:
    """The sets with what the loss needs of a reference, here the small model itself."""
    rows = labelled() if name == "kto" else sets()
    found = Preferences(sets=rows, pad_token=0)
    if name in ("orpo", "simpo"):
        return found
    other = Preferences(sets=strangers(rows), pad_token=0) if name == "kto" else None
    if other is not None:
        other = Preferences(
            sets=other.sets, pad_token=0, reference=reference_logprobs(other, asked)
        )
    kept = reference_logprobs(found, asked)
    return Preferences(sets=rows, pad_token=0, reference=kept, strangers=other)


def moved(model: nn.Module) -> nn.Module:
    """The model after someone has pushed it: no longer the reference."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 20)
    return model


def loss_of(name: str) -> Any:
    return functools.partial(DIRECT_LOSSES[name], **OPTIONS[name])


def naive(
    name: str, preferences: Preferences, *, policy: nn.Module, reference: nn.Module
) -> Tensor:
    """Set by set and pair by pair, without padding; the equations written out."""
    given, losses = OPTIONS[name], []

    def score(model: nn.Module, ranked: RankedTokens) -> list[Tensor]:
        batch = Preferences(sets=[ranked], pad_token=0).batch([0])
        return list(naive_logprobs(model, batch).sum(dim=1))

    shift: Any = 0.0
    if preferences.strangers is not None:
        gaps = [
            score(policy, ranked)[0] - score(reference, ranked)[0]
            for ranked in preferences.strangers.sets
        ]
        shift = torch.stack(gaps).mean().detach().clamp_min(0.0)
    beta = given["beta"]
    for ranked in preferences.sets:
        mine, theirs = score(policy, ranked), [s.detach() for s in score(reference, ranked)]
        if name == "kto":
            gain = beta * (mine[0] - theirs[0] - shift)
            good = ranked.desirable
            weight = given["desirable_weight" if good else "undesirable_weight"]
            losses.append(weight * (1 - (gain if good else -gain).sigmoid()))
            continue
        terms = []
        for a, b in itertools.combinations(range(len(mine)), 2):
            over = [m - t for m, t in zip(mine, theirs, strict=True)]
            each = [m / n for m, n in zip(mine, ranked.lengths, strict=True)]
            if name == "dpo":
                right, wrong = (logsigmoid(s * beta * (over[a] - over[b])) for s in (1, -1))
                smooth = given["label_smoothing"]
                terms.append(-(1 - smooth) * right - smooth * wrong)
            elif name == "ipo":
                gap = over[a] / ranked.lengths[a] - over[b] / ranked.lengths[b]
                terms.append((gap - 1 / (2 * beta)) ** 2)
            elif name == "orpo":
                odds = [torch.log(p.exp() / (1 - p.exp())) for p in each]
                terms.append(-each[a] - beta * logsigmoid(odds[a] - odds[b]))
            else:
                terms.append(-logsigmoid(beta * (each[a] - each[b]) - given["gamma"]))
        losses.append(torch.stack(terms).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_is_the_naive_loops_whatever_the_micro_batches(name: str) -> None:
    """Value and gradient of one step in float64, from one micro-batch to one of each set."""
    preferences = prepared(name, learner(small_model()))
    if preferences.reference:  # what is kept is float32: the loop reads float64
        assert preferences.reference[0].dtype == torch.float32
    model, start = moved(small_model()), small_model()
    expected = naive(name, preferences, policy=model, reference=start)
    expected.backward()
    wanted = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    found = []
    for tokens in (1000, 24, 1):
        student = moved(small_model())
        taught = learner(student, micro_batch_tokens=tokens)
        count = len(preferences.sets)
        rows = batches(preferences, count, learner=taught, steps=1, seed=0)
        batch = next(rows)
        batch = batch.replace(weights=batch.need("weights").double())
        result = taught.step(batch, objective(loss_of(name)))
        found.append(torch.cat([weight.grad.flatten() for weight in student.parameters()]))
        assert result.loss == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(found[-1], wanted, rtol=1e-4, atol=1e-7)
    assert all(torch.allclose(other, found[0], rtol=1e-9, atol=1e-14) for other in found)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_objective_pickles(name: str) -> None:
    again = pickle.loads(pickle.dumps(objective(loss_of(name))))
    preferences = prepared(name, learner(small_model()))
    batch = preferences.batch(range(3)).replace(baseline=torch.tensor(0.1))
    logprobs = -torch.rand(batch.tokens.shape) * batch.mask
    terms = [made(Outputs(logprobs=logprobs), batch) for made in (again, objective(loss_of(name)))]
    assert torch.equal(terms[0].loss, terms[1].loss)
    assert bool((terms[0].loss[batch.weights == 0] == 0).all())


def test_metrics_count_sets_and_not_tokens() -> None:
    """Of a pair, and of three: won, lost and won; margins β · (gap), by hand."""
    two = RankedTokens(rows=[(9, 1), (9, 2, 3)], lengths=(1, 2), start=1)
    three = RankedTokens(rows=[(8, 1, 1), (8, 2), (8, 3)], lengths=(2, 1, 1), start=1)
    reference = [torch.zeros(3), torch.zeros(4)]
    batch = Preferences(sets=[two, three], pad_token=0, reference=reference).batch([0, 1])
    logprobs = torch.zeros(batch.tokens.shape)
    logprobs[:, 1] = torch.tensor([-3.0, -1.0, -1.0, -4.0, -2.0])
    terms = objective(functools.partial(DIRECT_LOSSES["dpo"], beta=0.5))(
        Outputs(logprobs=logprobs), batch
    )
    found = {name: float(total(value, batch)) for name, value in terms.weighted.items()}
    # −3 against −1 is lost; of the three, −1 beats −4 and −2, and −4 loses to −2.
    assert found["preference/accuracy"] == pytest.approx((0 + 2 / 3) / 2)
    assert found["preference/margin"] == pytest.approx(0.5 * (-2 + (3 + 1 - 2) / 3) / 2)


def test_labels_are_right_on_their_side_of_the_divergence() -> None:
    rows = [RankedTokens(rows=[(9, 1)], lengths=(1,), start=1, desirable=d) for d in (True, False)]
    batch = Preferences(sets=rows, pad_token=0, reference=[torch.zeros(1)] * 2).batch([0, 1])
    batch = batch.replace(baseline=torch.tensor(1.0))
    logprobs = torch.tensor([[0.0, 1.5], [0.0, 3.0]])
    terms = objective(functools.partial(DIRECT_LOSSES["kto"], beta=2.0))(
        Outputs(logprobs=logprobs), batch
    )
    found = {name: float(total(value, batch)) for name, value in terms.weighted.items()}
    assert found == {"preference/accuracy": 0.5, "preference/margin": 2 * (0.5 - 2.0) / 2}


def test_strangers_have_another_prompt() -> None:
    """Also where several rows in a row have one prompt; where all have, the next row's."""
    rows = [
        RankedTokens(rows=[(prompt, 50 + n)], lengths=(1,), start=1)
        for n, prompt in enumerate((7, 7, 8, 9, 9))
    ]
    assert [made.rows[0] for made in strangers(rows)] == [
        (7, 52), (7, 52), (8, 53), (9, 50), (9, 50),
    ]  # fmt: skip
    assert [made.rows[0] for made in strangers(rows[:2])] == [(7, 51), (7, 50)]
    long = [
        RankedTokens(rows=[(1, 2, 3, 9)], lengths=(1,), start=3),
        RankedTokens(rows=[(4, 5, 6, 7)], lengths=(3,), start=1),
    ]
    assert [made.rows[0] for made in strangers(long)] == [(1, 2, 3, 5), (4, 9)]


@pytest.mark.parametrize("name", OPTIONS)
def test_it_learns_what_is_preferred(name: str) -> None:
    """Held-out numbers of the rows themselves: the loss falls, and all are in their order."""
    student = learner(small_model(), learning_rate=3e-3)
    preferences, loss = prepared(name, student), loss_of(name)
    before = parameters(student.model)
    first = held_out(preferences, student, loss=loss)
    assert torch.equal(parameters(student.model), before)  # it is only asked
    if preferences.reference:
        assert first["test/margin"] == pytest.approx(0, abs=1e-6)
    rows = batches(
        preferences, 4, learner=student, steps=30 * -(-len(preferences.sets) // 4), seed=0
    )
    fit(rows, student, objective=objective(loss), on_step=lambda step: None)
    last = held_out(preferences, student, loss=loss)
    assert last["test/loss"] < first["test/loss"]
    assert last["test/accuracy"] > 0.95
    assert last["test/margin"] > 0.1


def test_held_out_means_are_those_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sets are asked for at once."""
    student = learner(moved(small_model()))
    for name in ("dpo", "kto"):
        preferences = prepared(name, learner(small_model()))
        whole = held_out(preferences, student, loss=loss_of(name))
        monkeypatch.setattr("posttrain.pipelines.direct_preference.INFERRED", 3)
        parts = held_out(preferences, student, loss=loss_of(name))
        again = prepared(name, learner(small_model()))
        monkeypatch.undo()
        assert parts == pytest.approx(whole, rel=1e-9)
        assert all(map(torch.allclose, again.reference, preferences.reference))


def test_batches_go_on_where_they_were() -> None:
    preferences = prepared("dpo", learner(small_model()))
    student = learner(copy.deepcopy(small_model()))
    given: dict[str, Any] = {"learner": student, "steps": 4, "seed": 3}
    whole = list(batches(preferences, 3, **given))
    rest = list(batches(preferences, 3, **given, start=2))
    assert [len(batch.groups.unique()) for batch in whole] == [3, 1, 3, 1]
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.ref_logprobs, other.ref_logprobs)


def test_accuracy_is_of_what_the_loss_compares() -> None:
    """A short completion that gained little and a long one that gained more: by the token or not.

    Gains of 1.5 over 1 token and of 2 over 4: as a whole the second has more (DPO is wrong), by the
    token the first has (IPO is right): 1.5 − 0.5 = 1.
    """
    given = Preferences(
        sets=[RankedTokens(rows=[(5, 6), (5, 7, 8, 9, 10)], lengths=(1, 4), start=1)],
        pad_token=0,
        reference=[torch.zeros(5)],
    ).batch([0])
    logprobs = torch.zeros(2, 5, dtype=torch.float64)
    logprobs[0, 1], logprobs[1, 1:] = 1.5, 0.5
    found = {}
    for name in ("dpo", "ipo"):
        terms = direct_terms(Outputs(logprobs=logprobs), given, loss=loss_of(name))
        values = {key.rpartition("/")[2]: float(v.sum()) for key, v in terms.weighted.items()}
        found[name] = (values["accuracy"], values["margin"] / OPTIONS[name]["beta"])
    assert found == {"dpo": (0.0, pytest.approx(-0.5)), "ipo": (1.0, pytest.approx(1.0))}
