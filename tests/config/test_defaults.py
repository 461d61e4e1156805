"""What ``resolve`` fills in: from the table of algorithms, from other keys, from signatures."""

from typing import Any

import pytest
from config.fakes import read, refuses, resolved, rl
from small_runs import taught

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.table import ALGORITHMS, pieces
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config import Recipe, recipe_from_dict, resolve, to_dict
from posttrain.registry import resolve as build

pytestmark = pytest.mark.usefixtures("fake_tables")


def text(piece: dict[str, Any]) -> str:
    """A resolved piece as the table of algorithms prints it."""
    options = ", ".join(f"{key}={value}" for key, value in piece.items() if key != "name")
    return f"{piece['name']}({options})" if options else piece["name"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_brings_its_pieces_and_defaults(name: str) -> None:
    row, shown, section = ALGORITHMS[name], pieces(name), rl(algorithm=name, max_new_tokens=64)
    assert text(section.advantage) == shown["advantage"].replace("steps=None, ", "")
    assert text(section.loss) == shown["policy loss"]
    assert text(section.weights).replace("=64", "=max_new_tokens") == shown["averaging"]
    assert (text(section.critic.loss) if section.critic else "none") == shown["critic"]
    assert section.penalty_target == row.penalty_target
    assert section.group_size == row.group_size
    assert section.epochs == row.epochs
    assert section.dynamic_sampling is row.dynamic_sampling
    assert section.overlong_buffer == (16 if row.overlong_penalty else 0)
    assert section.kl.placement == row.kl.placement
    assert section.kl.coefficient == row.kl.coefficient
    assert section.kl.target == row.kl.target
    if row.kl.placement != "none":
        assert section.kl.estimator == row.kl.estimator
        assert section.kl.rule == row.kl.rule
        assert (section.kl.direction, section.kl.refresh_every) == ("reverse", 0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resolved_pieces_can_be_built(name: str) -> None:
    section = rl(algorithm=name)
    built: list[tuple[Any, Any]] = [
        (section.advantage, ADVANTAGES),
        (section.loss, POLICY_LOSSES),
        (section.weights, WEIGHTS),
    ]
    built += [(section.critic.loss, VALUE_LOSSES)] if section.critic else []
    for piece, table in built:
        assert callable(build(piece, table, kind="piece"))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"evaluate_every": 5}])
def test_resolving_again_changes_nothing(name: str, sampling: dict[str, Any]) -> None:
    values = {"rl": {"algorithm": name, **sampling}, "sft": {}, "eval": {"samples": 2}}
    once = resolved({**values, **taught(name)})
    assert resolve(once) == once
    assert to_dict(resolve(recipe_from_dict(to_dict(once)))) == to_dict(once)


def test_an_unknown_algorithm_is_refused_with_the_near_one() -> None:
    known = ", ".join(sorted(ALGORITHMS))
    with refuses(f"rl.algorithm: unknown name 'grop'; did you mean 'grpo'? Known: {known}"):
        rl(algorithm="grop")


def test_what_the_user_gives_goes_before_the_row() -> None:
    section = rl(
        algorithm="dapo",
        group_size=3,
        epochs=2,
        dynamic_sampling=False,
        overlong_buffer=0,
        advantage="leave_one_out",
        weights="sequence_mean",
    )
    assert (section.group_size, section.epochs) == (3, 2)
    assert (section.dynamic_sampling, section.overlong_buffer) == (False, 0)
    assert section.advantage == {"name": "leave_one_out"}
    assert section.weights == {"name": "sequence_mean"}


def test_a_name_replaces_the_piece_and_a_table_without_one_changes_it() -> None:
    assert rl(algorithm="dapo").loss == {"name": "clipped", "clip_low": 0.2, "clip_high": 0.28}
    named = rl(algorithm="dapo", loss={"name": "clipped", "clip_low": 0.1})
    assert named.loss == {"name": "clipped", "clip_low": 0.1, "clip_high": 0.2}
    changed = rl(algorithm="dapo", loss={"clip_low": 0.1})
    assert changed.loss == {"name": "clipped", "clip_low": 0.1, "clip_high": 0.28}
    assert rl(engine={"batch_size": 3}).engine == {"name": "native", "batch_size": 3}


def test_max_new_tokens_stands_for_its_number() -> None:
    weights = {"name": "sequence_sum", "length": "max_new_tokens"}
    assert rl(weights=weights, max_new_tokens=77).weights["length"] == 77


def test_truncated_sampling_brings_the_correction_and_none_keeps_it_off() -> None:
    truncated = {"name": "truncated", "cap": 2.0, "low": 0.0, "level": "token"}
    assert rl().correction == {"name": "none"}
    assert rl(top_k=5).correction == truncated
    assert rl(top_p=0.9).correction == truncated
    assert rl(max_lag=1).correction == truncated
    assert rl(max_lag=1, correction="none").correction == {"name": "none"}
    assert rl(top_p=0.9, correction="none").correction == {"name": "none"}
    assert rl(top_p=0.9, correction={"cap": 3}).correction == {**truncated, "cap": 3}
    masked = {"name": "masked", "low": 0.5, "high": 2.0, "level": "token"}
    assert rl(correction="masked").correction == masked


def test_keys_that_have_no_effect_have_a_value_and_are_not_shown() -> None:
    def shown(**values: Any) -> dict[str, Any]:
        section: dict[str, Any] = to_dict(resolved({"rl": values}))["rl"]
        return section

    assert {"evaluate_problems", "max_resamples", "kl_stop"}.isdisjoint(shown())
    assert (rl().evaluate_problems, rl().max_resamples) == (100, 8)
    assert shown(evaluate_every=5)["evaluate_problems"] == 100
    assert shown(dynamic_sampling=True)["max_resamples"] == 8
    assert "max_resamples" not in shown(algorithm="dapo", dynamic_sampling=False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resolved_recipe_has_a_value_of_its_type_for_every_key(name: str) -> None:
    every: dict[str, Any] = {"sft": {}, "prefer": {}, "reward": {}, "eval": {}}
    recipe = resolved({**every, "rl": {"algorithm": name}, **taught(name)})
    for section in (recipe.run, *(getattr(recipe, stage) for stage in recipe.stages)):
        assert type(section).model_validate(dict(section)) == section
    kl = recipe.rl.kl
    assert type(kl).model_validate(dict(kl)) == kl


def test_stages_are_those_named_else_the_sections_there_are() -> None:
    assert resolved({"eval": {}, "rl": {}, "sft": {}}).run.stages == ("sft", "rl", "eval")
    assert resolved({"eval": {}, "rl": {}}).run.stages == ("rl", "eval")
    named = resolved({"rl": {}, "run": {"stages": ["eval", "sft"]}})
    assert named.run.stages == ("eval", "sft")
    assert named.sft is not None
    assert named.eval is not None
    everything: dict[str, Any] = {"eval": {}, "rl": {}, "reward": {}, "prefer": {}, "sft": {}}
    assert resolved(everything).run.stages == ("sft", "prefer", "reward", "rl", "eval")
    direct = resolved({"eval": {}, "dpo": {}, "prefer": {}, "sft": {}})
    assert direct.run.stages == ("sft", "prefer", "dpo", "eval")
    named = resolved({"run": {"stages": ["prefer", "reward"]}})
    assert named.prefer is not None
    assert named.reward is not None
    with refuses(
        "no stage to run; add a section ([sft], [prefer], [reward], [dpo], [rl], [eval]), "
        "or set run.stages"
    ):
        resolved()


def test_the_options_of_dpo_are_those_of_its_loss() -> None:
    """Its defaults, unless they are given; those that it has not are not there."""
    own = resolved({"prefer": {}, "dpo": {}}).dpo
    assert (own.beta, own.label_smoothing, own.gamma) == (0.1, 0.0, None)
    simple = resolved({"prefer": {}, "dpo": {"loss": "simpo", "gamma": 0.5}}).dpo
    assert (simple.beta, simple.label_smoothing, simple.gamma) == (2.0, None, 0.5)
    assert "desirable_weight" not in to_dict(resolved({"prefer": {}, "dpo": {}}))["dpo"]
    kto = to_dict(resolved({"prefer": {}, "dpo": {"loss": "kto"}}))["dpo"]
    assert (kto["desirable_weight"], kto["undesirable_weight"]) == (1.0, 1.0)
    assert resolved({"dpo": {"data": __file__}}).dpo.test_share == 0.1


def test_a_section_whose_stage_is_not_run_is_left_as_it_is() -> None:
    values = {"rl": {"algorithm": "ppo", "temperature": 0.0}, "run": {"stages": ["eval"]}}
    recipe = resolved(values)
    assert not hasattr(recipe, "rl")
    assert recipe.written.rl == read(values).rl
    assert to_dict(recipe)["rl"] == to_dict(read(values))["rl"]
    assert to_dict(resolved({**values, "rl": {"algorithm": "no such"}}))["rl"]
    others = {"sft": {"data": "no such file"}, "eval": {"temperature": 0.5}}
    recipe = resolved({**others, "rl": {}, "run": {"stages": ["rl"]}})
    assert to_dict(recipe)["eval"] == to_dict(read(others))["eval"]


def test_eval_takes_its_limit_from_rl_and_a_temperature_only_with_samples() -> None:
    def found(values: dict[str, Any]) -> tuple[Any, Any]:
        section = to_dict(resolved(values))["eval"]
        return section["max_new_tokens"], section.get("temperature")

    assert found({"eval": {}}) == (256, None)
    assert found({"eval": {}, "rl": {"max_new_tokens": 32}}) == (32, None)
    assert found({"eval": {"max_new_tokens": 9, "samples": 1}, "rl": {}}) == (9, 1.0)
    assert found({"eval": {"samples": 4, "temperature": 0.7}}) == (256, 0.7)


def test_supplied_parts_are_not_looked_for_in_the_recipe() -> None:
    def given(values: dict[str, Any], *parts: Any) -> Recipe:
        return resolve(recipe_from_dict(values), supplied=parts)

    recipe = given({"rl": {}}, "task", "rewards", "engine")
    assert recipe.rl is not None
    assert (recipe.task, recipe.rl.engine) == (None, None)
    assert given({"rl": {"top_k": 5}}, "task", "engine").rl is not None
    with refuses("task: given twice, by name and as an object; drop one of them"):
        given({"task": "sums", "rl": {}}, "task")
    with refuses("engine: given twice, by name and as an object; drop one of them"):
        given({"rl": {"engine": "native"}}, "task", "engine")
