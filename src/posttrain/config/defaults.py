"""``resolve``: every default that depends on something else, every piece and every rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from posttrain.algorithms.table import (
    CORRECTION,
    KL,
    Algorithm,
    algorithm,
    piece_table,
)
from posttrain.config.critic import complete_critic, penalty
from posttrain.config.describe import ConfigError, collect
from posttrain.config.fields import STAGES, Spec
from posttrain.config.pieces import (
    NO_CORRECTION,
    check_model,
    complete,
    complete_reward,
    complete_task,
    correction_table,
    engine_names,
    engine_table,
)
from posttrain.config.rules import broken_engine_rules, broken_piece_rules, broken_rules
from posttrain.config.sections import (
    EvalSection,
    KlSection,
    PreferSection,
    Recipe,
    RewardSection,
    RlSection,
    SftSection,
)
from posttrain.registry import Function, look_up

Part = Literal["task", "rewards", "engine"]
MAX_RESAMPLES = 8
EVALUATE_PROBLEMS = 100
MAX_NEW_TOKENS = 256
TEST_SHARE = 0.1
HORIZON = 10_000
_ONLY_WITH_KL = (
    "coefficient",
    "estimator",
    "direction",
    "weighted",
    "rule",
    "target",
    "horizon",
    "refresh_every",
    "dtype",
    "offload",
)


def resolve(recipe: Recipe, *, supplied: Collection[Part] = ()) -> Recipe:
    """The recipe with every default filled in and every rule checked; resolving twice is the same.

    Sections whose stage is not run are left as they are. ``supplied`` names parts that the caller
    hands over as Python objects: they are not looked for in the recipe.
    """
    recipe = _with_stages(recipe)
    filled: dict[str, Any] = {}

    def fill(section: str, make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: filled.update({section: make()})

    steps: list[Callable[[], None]] = [
        lambda: check_model(recipe.model),
        lambda: _check_trackers(recipe),
        lambda: _given_once(recipe, supplied),
    ]
    if recipe.task is not None and "task" not in supplied:
        named = None if "rewards" in supplied else recipe.rewards
        steps.append(fill("task", lambda: complete_task(recipe.task or {}, rewards=named)))
    if "rewards" not in supplied:
        steps.append(fill("rewards", lambda: _rewards(recipe.rewards)))
    if "prefer" in recipe.stages:
        steps.append(fill("prefer", lambda: _prefer(recipe)))
    if "reward" in recipe.stages:
        steps.append(fill("reward", lambda: _reward(recipe)))
    if "rl" in recipe.stages:
        steps.append(fill("rl", lambda: _rl(recipe.rl or RlSection())))
        if "engine" not in supplied:
            steps.append(lambda: _check_engine(recipe.rl or RlSection()))
    if "eval" in recipe.stages:
        steps.append(fill("eval", lambda: _eval(recipe)))
    collect(steps, source=recipe.source)
    recipe = recipe.model_copy(update=filled)
    _raise(broken_rules(recipe, supplied=supplied), recipe)
    # What follows loads torch and more: last, so that every other mistake shows at once.
    return _tried(recipe, supplied) if "rl" in recipe.stages else recipe


def _check_trackers(recipe: Recipe) -> None:
    for name in recipe.run.trackers:
        if ":" in name:
            look_up(name, {}, kind="run.trackers")


def _tried(recipe: Recipe, supplied: Collection[Part]) -> Recipe:
    """The recipe with its critic and its engine, once the pieces of ``[rl]`` have been called."""
    from posttrain.config.asked import asked
    from posttrain.config.probe import probe

    rl = recipe.rl or RlSection()
    _raise(broken_piece_rules(rl), recipe)
    if rl.critic is None and "values" in asked(rl):
        rl = rl.model_copy(update={"critic": complete_critic(rl, algorithm_row(rl))})
    collect(probe(rl), source=recipe.source)
    if "engine" not in supplied:
        rl = _with_engine(rl, engine_table())
        _raise(broken_engine_rules(rl), recipe)
    return recipe.model_copy(update={"rl": rl})


def _raise(problems: Sequence[str], recipe: Recipe) -> None:
    if problems:
        raise ConfigError(problems, source=recipe.source)


def _check_engine(rl: RlSection) -> None:
    _with_engine(rl, engine_names())


def _with_engine(rl: RlSection, table: Mapping[str, Function]) -> RlSection:
    engine = complete(rl.engine, {"name": "native"}, table=table, key="rl.engine")
    return rl.model_copy(update={"engine": engine})


def _given_once(recipe: Recipe, supplied: Collection[Part]) -> None:
    given = {
        "task": recipe.task,
        "rewards": recipe.rewards,
        "engine": recipe.rl and recipe.rl.engine,
    }
    twice = [part for part in supplied if given[part]]
    if twice:
        raise ValueError(f"{twice[0]}: given twice, by name and as an object; drop one of them")


def _with_stages(recipe: Recipe) -> Recipe:
    if not recipe.stages:
        sections = ", ".join(f"[{stage}]" for stage in STAGES)
        problem = f"no stage to run; add a section ({sections}), or set run.stages"
        raise ConfigError([problem], source=recipe.source)
    update: dict[str, Any] = {"run": recipe.run.model_copy(update={"stages": recipe.stages})}
    if "sft" in recipe.stages and recipe.sft is None:
        update["sft"] = SftSection()
    return recipe.model_copy(update=update)


def _rewards(given: Mapping[str, Spec], *, key: str = "rewards") -> dict[str, Spec]:
    done: dict[str, Spec] = {}

    def add(name: str, spec: Spec) -> Callable[[], None]:
        return lambda: done.update({name: complete_reward(name, spec, key=key)})

    collect([add(name, spec) for name, spec in given.items()], source="")
    return done


def _prefer(recipe: Recipe) -> PreferSection:
    section = recipe.prefer or PreferSection()
    limit = recipe.rl.max_new_tokens if recipe.rl is not None else MAX_NEW_TOKENS
    update = {
        "rewards": _rewards(section.rewards, key="prefer.rewards"),
        "max_new_tokens": section.max_new_tokens or limit,
    }
    return section.model_copy(update=update)


def _reward(recipe: Recipe) -> RewardSection:
    section = recipe.reward or RewardSection()
    if section.data == "prefer" or section.test_data is not None:
        return section
    return section.model_copy(update={"test_share": section.test_share or TEST_SHARE})


def _eval(recipe: Recipe) -> EvalSection:
    section = recipe.eval or EvalSection()
    limit = recipe.rl.max_new_tokens if recipe.rl is not None else MAX_NEW_TOKENS
    return section.model_copy(
        update={
            "max_new_tokens": section.max_new_tokens or limit,
            "temperature": section.temperature or (1.0 if section.samples else None),
        }
    )


def _rl(rl: RlSection) -> RlSection:
    row = algorithm_row(rl)
    filled: dict[str, Any] = {
        "group_size": rl.group_size or row.group_size,
        "epochs": rl.epochs or row.epochs,
        "dynamic_sampling": _first(rl.dynamic_sampling, row.dynamic_sampling),
        "overlong_buffer": _first(rl.overlong_buffer, _buffer(rl, row)),
    }
    if filled["dynamic_sampling"]:
        filled["max_resamples"] = rl.max_resamples or MAX_RESAMPLES
    if rl.evaluate_every:
        filled["evaluate_problems"] = _first(rl.evaluate_problems, EVALUATE_PROBLEMS)
    differs = rl.max_lag > 0 or rl.top_k > 0 or rl.top_p < 1  # the sampler from the policy
    correction = CORRECTION if differs else {"name": NO_CORRECTION}
    tables: dict[str, tuple[Mapping[str, Any], Mapping[str, Function]]] = {
        "advantage": (row.advantage, piece_table("advantage")),
        "loss": (row.loss, piece_table("policy loss")),
        "weights": (row.weights, piece_table("averaging")),
        "correction": (correction, correction_table()),
    }

    def add(name: str) -> Callable[[], None]:
        default, table = tables[name]
        given = _with_limit(getattr(rl, name), rl)
        spec = _with_limit(default, rl)
        return lambda: filled.update({name: complete(given, spec, table=table, key=f"rl.{name}")})

    def add_kl() -> None:
        filled["kl"] = _kl(rl.kl or KlSection(), row.kl, name=rl.algorithm)

    collect([add_kl, *map(add, tables)], source="")
    chosen = rl.model_copy(update=filled)

    def add_critic() -> None:
        filled["critic"] = None if rl.critic is None else complete_critic(chosen, row)

    def add_penalty() -> None:
        filled["penalty_target"] = penalty(chosen, row)

    collect([add_critic, add_penalty], source="")
    return rl.model_copy(update=filled)


def algorithm_row(rl: RlSection) -> Algorithm:
    """The row of the table that a section names."""
    try:
        return algorithm(rl.algorithm)
    except ValueError as error:
        raise ValueError(f"rl.{error}") from None


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _buffer(rl: RlSection, row: Algorithm) -> int:
    return max(rl.max_new_tokens // 4, 1) if row.overlong_penalty else 0


def _with_limit(piece: Any, rl: RlSection) -> Any:
    """A piece whose option is "max_new_tokens" (Dr. GRPO's constant), with the number in place."""
    if piece is None:
        return None
    return {k: rl.max_new_tokens if v == "max_new_tokens" else v for k, v in piece.items()}


def _kl(given: KlSection, row: KL, *, name: str) -> KlSection:
    """The algorithm's KL with what the user changed; nothing that would have no effect."""
    off = given.placement is None and given.coefficient == 0
    placement = given.placement or ("none" if off else row.placement)
    if placement == "none":
        return _no_kl(given, name=name)
    same = placement == row.placement
    coefficient = _first(given.coefficient, row.coefficient if same else None)
    if not coefficient:
        raise ValueError(
            f"rl.kl.coefficient: placement {placement!r} needs a coefficient above 0 (0.04, say); "
            'to do without a reference model, set rl.kl.placement to "none"'
        )
    if given.weighted and placement == "reward":
        raise ValueError(
            "rl.kl.weighted: no effect in the reward, which is found before π moves: ρ is 1; "
            'drop it, or set rl.kl.placement to "loss"'
        )
    rule = given.rule or (row.rule if same else "fixed")
    target = _first(given.target, row.target if same and rule == row.rule else None)
    if rule == "fixed" and target is not None:
        raise ValueError(
            "rl.kl.target: a fixed coefficient follows no target; "
            'set rl.kl.rule to "proportional" or "doubling", or drop the target'
        )
    if given.horizon is not None and rule != "proportional":
        raise ValueError(
            f"rl.kl.horizon: no effect with rule {rule!r}; "
            'drop it, or set rl.kl.rule to "proportional"'
        )
    if rule != "fixed" and target is None:
        raise ValueError(f"rl.kl.target: rule {rule!r} needs the divergence to steer to, in nats")
    usual = row.estimator if same else ("k1" if placement == "reward" else "k3")
    return given.model_copy(
        update={
            "placement": placement,
            "coefficient": coefficient,
            "estimator": given.estimator or usual,
            "direction": given.direction or "reverse",
            "weighted": bool(given.weighted),
            "rule": rule,
            "target": target,
            "horizon": given.horizon or (HORIZON if rule == "proportional" else None),
            "refresh_every": given.refresh_every or 0,
            "dtype": given.dtype or "model",
            "offload": bool(given.offload),
        }
    )


def _no_kl(given: KlSection, *, name: str) -> KlSection:
    unused = [f"rl.kl.{key}" for key in _ONLY_WITH_KL if getattr(given, key) is not None]
    why, mend = f"algorithm {name!r} has no KL", 'set rl.kl.placement to "loss" or "reward"'
    if given.coefficient == 0:
        unused.remove("rl.kl.coefficient")
        why, mend = "rl.kl.coefficient is 0", "set a coefficient above 0"
    if given.placement is not None:
        why, mend = 'rl.kl.placement is "none"', 'set it to "loss" or "reward"'
    if unused:
        keys, those = ", ".join(unused), "it" if len(unused) == 1 else "them"
        raise ValueError(f"{keys}: no effect, because {why}; {mend}, or drop {those}")
    return KlSection(placement="none", coefficient=0.0)
