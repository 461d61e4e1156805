"""The table of algorithms: every row resolves, and some rows are spelt out in full."""

import dataclasses
import inspect

import pytest
import torch
from algorithms.batches import moved, ragged, refuses

from posttrain.algorithms import kl, losses, weights
from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import smallest_group
from posttrain.algorithms.table import (
    ALGORITHMS,
    KL,
    algorithm,
    difference,
    kinds_of,
    pieces,
    real_piece,
)
from posttrain.registry import options, resolve

LIMIT = "max_new_tokens"  # stands for a number that only a run knows


def filled(piece: dict[str, object]) -> dict[str, object]:
    return {key: 16 if value == LIMIT else value for key, value in piece.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_piece_resolves_with_its_options(name: str) -> None:
    row = algorithm(name)
    assert row is ALGORITHMS[name]
    resolve(row.advantage, ADVANTAGES, kind="advantage")
    resolve(row.loss, POLICY_LOSSES, kind="policy loss")
    resolve(filled(dict(row.weights)), weights.WEIGHTS, kind="weights")
    assert row.critic == (row.value_loss is not None)
    if row.value_loss is not None:
        resolve(row.value_loss, VALUE_LOSSES, kind="value loss")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_makes_a_finite_update(name: str) -> None:
    """The pieces fit together: advantage, loss and weights of a row, run one after the other."""
    row = algorithm(name)
    group_size = max(4, smallest_group(resolve(row.advantage, ADVANTAGES, kind="advantage")))
    alike = ragged().replace(groups=torch.arange(12) // min(6, group_size + 1))
    assert group_size <= row.group_size or row.group_size == 1
    batch = resolve(row.advantage, ADVANTAGES, kind="advantage")(alike)
    batch = resolve(filled(dict(row.weights)), weights.WEIGHTS, kind="weights")(batch)
    logprobs = moved(batch).requires_grad_()
    batch = batch.replace(divergence=logprobs.square())  # stands for the learner's
    terms = resolve(row.loss, POLICY_LOSSES, kind="policy loss")(logprobs, batch)
    (gradient,) = torch.autograd.grad(weights.total(terms.loss, batch), logprobs)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 1e-4
    if row.value_loss is not None:
        values = resolve(row.value_loss, VALUE_LOSSES, kind="value loss")(logprobs, batch)
        assert weights.total(values.loss, batch) > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_explains_itself(name: str) -> None:
    row = algorithm(name)
    assert row.title.strip()
    assert "J = " in row.equation
    assert row.reference[-1].isdigit()  # a year, an identifier or a section
    assert row.neighbours
    assert name not in row.neighbours
    assert set(row.neighbours) <= set(ALGORITHMS)
    assert row.group_size >= 1
    assert row.epochs >= 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_that_compare_siblings_have_siblings(name: str) -> None:
    row = algorithm(name)
    compares = row.advantage["name"] in {
        *("group_centred", "group_normalised", "max_only", "leave_one_out", "pass_at_k"),
        "turn_group_normalised",
    }
    assert (row.group_size >= 2) == compares
    assert row.critic == (row.advantage["name"] == "gae")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_divergence_of_every_row_is_possible(name: str) -> None:
    row = algorithm(name).kl
    assert (row.placement == "none") == (row.coefficient == 0.0)
    kl.Coefficient(value=row.coefficient, rule=row.rule, target=row.target)
    assert row.estimator == ("k1" if row.placement == "reward" else "k3")


def test_ppo_in_full() -> None:
    assert pieces("ppo") == {
        "advantage": "gae(gamma=1.0, lam=0.95, steps=None, normalise=True, deviation=population)",
        "policy loss": "clipped(clip_low=0.2, clip_high=0.2)",
        "averaging": "token_mean",
        "critic": "clipped(clip=0.2)",
        "KL to reference": "k1 in the reward, β = 0.05",
        "completions per prompt": "1",
        "epochs per batch": "4",
        "dynamic sampling": "no",
        "overlong penalty": "no",
    }


def test_dapo_in_full() -> None:
    assert pieces("dapo") == {
        "advantage": "group_normalised(deviation=sample, epsilon=1e-06)",
        "policy loss": "clipped(clip_low=0.2, clip_high=0.28)",
        "averaging": "token_mean",
        "critic": "none",
        "KL to reference": "none",
        "completions per prompt": "8",
        "epochs per batch": "1",
        "dynamic sampling": "yes",
        "overlong penalty": "yes",
    }


def test_reinforce_in_full() -> None:
    assert pieces("reinforce") == {
        "advantage": "return",
        "policy loss": "naive",
        "averaging": "sequence_sum(length=1)",
        "critic": "none",
        "KL to reference": "none",
        "completions per prompt": "1",
        "epochs per batch": "1",
        "dynamic sampling": "no",
        "overlong penalty": "no",
    }


def test_the_difference_of_two_rows() -> None:
    assert difference("grpo", "dr_grpo") == {
        "advantage": ("group_normalised(deviation=sample, epsilon=1e-06)", "group_centred"),
        "averaging": ("sequence_mean", "sequence_sum(length=max_new_tokens)"),
        "KL to reference": ("k3 in the loss, β = 0.04", "none"),
    }
    assert difference("ppo", "ppo_penalty") == {
        "policy loss": ("clipped(clip_low=0.2, clip_high=0.2)", "penalised(coefficient=1.0)")
    }
    assert difference("gspo", "gspo") == {}


@pytest.mark.parametrize("look", [algorithm, pieces, lambda name: difference("grpo", name)])
def test_an_unknown_algorithm_gets_a_hint(look: object) -> None:
    with refuses(
        "algorithm: unknown name 'grop'; did you mean 'grpo'? Known: "
        + ", ".join(sorted(ALGORITHMS))
    ):
        look("grop")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("reinforce++", "reinforce_pp"), ("REINFORCE++", "reinforce_pp"), ("gae", "ppo")],
)
def test_a_name_of_another_library_is_answered_with_the_row_that_it_means(
    theirs: str, ours: str
) -> None:
    """By its letters it would be another algorithm, or none."""
    with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
        algorithm(theirs)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"name": "gaee"}, "piece: unknown name 'gaee'; did you mean 'gae'? Known: "),
        ({"gamma": 1.0}, "piece: expected a name or a table with a 'name', got {'gamma': 1.0}"),
    ],
)
def test_a_row_with_an_unknown_piece_says_so(
    piece: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(ALGORITHMS["ppo"], advantage=piece)
    monkeypatch.setitem(ALGORITHMS, "ppo", wrong)
    with refuses(message + ", ".join(sorted(ADVANTAGES)) if "name" in piece else message):
        pieces("ppo")


def test_rows_keep_to_the_published_defaults() -> None:
    assert ALGORITHMS["grpo"].kl == KL(placement="loss", coefficient=0.04, estimator="k3")
    assert {name for name, row in ALGORITHMS.items() if row.critic} == {"ppo", "ppo_penalty"}
    assert KL() == KL(placement="none", coefficient=0.0, estimator="k3", rule="fixed", target=None)
    row = ALGORITHMS["reinforce"]
    assert dataclasses.replace(row, group_size=8).kl == KL()


TABLES = (ADVANTAGES, POLICY_LOSSES, VALUE_LOSSES, losses.PREFERENCE_LOSSES, weights.WEIGHTS)


@pytest.mark.parametrize("table", TABLES)
def test_every_function_of_a_table_documents_typed_options(table: dict[str, object]) -> None:
    for function in table.values():
        assert inspect.getdoc(function)
        for option in options(function).values():
            assert option.annotation is not inspect.Parameter.empty


def test_a_name_is_found_in_every_table_that_has_it() -> None:
    assert kinds_of("clipped") == ["policy loss", "value loss"]
    assert kinds_of("gae") == ["advantage"]
    assert kinds_of("dapo") == []
    unknown = r"explain: unknown name 'grppo'; did you mean 'grpo'\?"
    with pytest.raises(ValueError, match=f"^{unknown}") as refused:
        kinds_of("grppo")
    known = str(refused.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert {"dapo", "kl", "clipped", "gae"} <= set(known)


def test_a_piece_is_found_by_name_and_kind() -> None:
    assert real_piece("clipped", "policy loss") is losses.clipped
    assert real_piece("clipped", "value loss") is not losses.clipped
