"""What ``posttrain.algorithms`` shows, and what a piece declares about itself."""

import functools
import importlib
import inspect
import pkgutil
import types
from collections import Counter

import pytest

from posttrain import algorithms
from posttrain.algorithms.advantages import ADVANTAGES, without_siblings
from posttrain.algorithms.pieces import Facts, centred_over, facts, needed, piece, smallest_group
from posttrain.types import Batch, Terms

INNER = ("posttrain.algorithms.checks",)  # errors for bad input: nobody else's to call
# A module has the name, so the function is table.pieces; the others read tables without torch.
BY_TOPIC = {"pieces", "piece_table", "kinds_of", "real_piece"}
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.iter_modules(algorithms.__path__, "posttrain.algorithms.")
    if found.name not in INNER
]


def public(module: types.ModuleType) -> dict[str, object]:
    """What a package lists; of a module, the functions, classes and tables that it defines."""
    if hasattr(module, "__path__"):
        return {name: getattr(module, name) for name in module.__all__}
    own = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in BY_TOPIC or "__mutmut" in name:  # of `make mutants`
            continue
        code = inspect.isfunction(value) or inspect.isclass(value)
        if isinstance(value, dict | frozenset) or (code and value.__module__ == module.__name__):
            own[name] = value
    return own


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_everything_public_is_shown_by_its_own_name(module: types.ModuleType) -> None:
    found = public(module)
    missing = sorted(set(found) - set(algorithms.__all__))
    assert not missing, f"add to posttrain/algorithms/__init__.py: {missing}"
    for name, value in found.items():
        assert getattr(algorithms, name) is value


def test_nothing_is_shown_twice_or_that_is_not_there() -> None:
    everything = {name for module in MODULES for name in public(module)}
    assert set(algorithms.__all__) == everything | {"Batch", "Terms"}
    assert max(Counter(algorithms.__all__).values()) == 1
    assert (algorithms.Batch, algorithms.Terms) == (Batch, Terms)


def test_dir_and_the_docstring_name_every_topic() -> None:
    topics = {
        found.name
        for found in pkgutil.iter_modules(algorithms.__path__)
        if f"posttrain.algorithms.{found.name}" not in INNER
    }
    assert set(dir(algorithms)) == set(algorithms.__all__) | topics
    assert not topics & set(algorithms.__all__)
    for topic in topics:
        assert f"``{topic}``" in (algorithms.__doc__ or "")
        assert algorithms.__getattr__(topic) is importlib.import_module(
            f"posttrain.algorithms.{topic}"
        )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for name in ("grpo", "advantages.baselines.per_token", "checks_"):
        with pytest.raises(
            AttributeError, match=f"^module 'posttrain.algorithms' has no attribute '{name}'$"
        ):
            getattr(algorithms, name)


def test_a_piece_that_declares_nothing_needs_nothing() -> None:
    def mine(batch: Batch, *, k: int = 3) -> Batch:
        return batch

    assert facts(mine) == Facts() == Facts(needs=frozenset(), smallest_group=1)
    assert facts(len) == Facts()  # a function of C has no attributes
    assert smallest_group(mine) == 1
    assert smallest_group(functools.partial(mine, k=5)) == 1


def test_a_piece_declares_what_it_needs_and_stays_the_same_function() -> None:
    def mine(batch: Batch, *, k: int = 3, scale: float = 1.0) -> Batch:
        return batch

    declared = piece(needs=["greedy_rewards", "values"], smallest_group=lambda k, **_: 2 * k)(mine)
    assert declared is mine
    bound = functools.partial(mine, k=5)
    assert facts(mine).needs == facts(bound).needs == {"greedy_rewards", "values"}
    assert facts(functools.partial(bound, scale=3.0)) is facts(mine)
    assert (smallest_group(mine), smallest_group(bound)) == (6, 10)
    assert smallest_group(functools.partial(mine, scale=2.0)) == 6
    fixed = piece(smallest_group=4)(lambda batch: batch)
    assert (smallest_group(fixed), facts(fixed).needs) == (4, frozenset())
    greedy = piece(needs={"greedy_rewards"})(lambda batch: batch)
    assert (smallest_group(greedy), facts(greedy).needs) == (1, {"greedy_rewards"})


def test_a_wrapper_has_declared_nothing() -> None:
    """functools.wraps copies attributes; what the wrapper does is its own."""

    @functools.wraps(ADVANTAGES["greedy_baseline"])
    def wrapped(batch: Batch) -> Batch:
        return batch

    assert facts(wrapped) == Facts()


def test_what_the_advantages_declare() -> None:
    of_two = {"optimal_baseline", "group_centred", "group_normalised", "max_only", "leave_one_out"}
    of_two |= {"leave_one_out_normalised", "turn_group_normalised"}
    for name, advantage in ADVANTAGES.items():
        least = 5 if name == "pass_at_k" else 2 if name in of_two else 1
        assert smallest_group(advantage) == least, name
        fields = {
            "moving_baseline": {"baseline"},
            "greedy_baseline": {"greedy_rewards"},
            "optimal_baseline": {"score_norms"},
            "return_to_go": {"token_rewards"},
            "turn_return_to_go": {"token_rewards"},
            "turn_group_normalised": {"token_rewards"},
            "gae": {"token_rewards", "values"},
            "towards_teacher": {"teacher_logprobs"},
        }
        assert needed(advantage) == fields.get(name, set()), name
    assert smallest_group(functools.partial(ADVANTAGES["pass_at_k"], k=7)) == 8
    centred = functools.partial(ADVANTAGES["batch_whitened"], centre_groups=True, gamma=0.5)
    assert smallest_group(centred) == 2
    assert needed(centred) == {"token_rewards"}
    mixed = functools.partial(ADVANTAGES["towards_teacher"], reward=0.5)
    assert smallest_group(mixed) == 2
    alone = [name for name in ADVANTAGES if name not in {*of_two, "pass_at_k"}]
    assert without_siblings() == alone


def test_over_what_the_advantages_say_that_they_are_centred() -> None:
    found = {name: centred_over(advantage) for name, advantage in ADVANTAGES.items()}
    groups = {"group_centred", "group_normalised", "leave_one_out", "pass_at_k"}
    assert {name for name in found if found[name] == "group"} == groups
    assert {name for name in found if found[name] == "turn"} == {"turn_group_normalised"}
    assert {name for name in found if found[name] == "batch"} == {"batch_whitened", "gae"}
    assert centred_over(functools.partial(ADVANTAGES["gae"], normalise=False)) is None
    assert centred_over(functools.partial(ADVANTAGES["gae"], lam=0.5)) == "batch"
    assert centred_over(print) is None
