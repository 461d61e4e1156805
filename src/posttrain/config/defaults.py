"""``resolve``: every default that depends on something else, every piece and every rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.algorithms.table import CORRECTION, KL, VALUE_LOSS, Algorithm, algorithm, piece_table
from posttrain.config.data_stages import RewardSection, SftSection, WrittenDpo, WrittenPrefer
from posttrain.config.describe import ConfigError, collect
from posttrain.config.fields import STAGES, Spec
from posttrain.config.no_effect import (
    NO_EFFECT,
    NO_EFFECT_OF_PIECES,
    OnlyWith,
    left_out,
    without_effect,
)
from posttrain.config.preference_rules import direct_options
from posttrain.config.recipe_rules import broken_engine_rules, broken_piece_rules, broken_rules
from posttrain.config.resolved import (
    CriticSection,
    DpoSection,
    EvalSection,
    KlSection,
    PreferSection,
    Resolved,
    RlSection,
    RunSection,
)
from posttrain.config.sections import (
    ClusterSection,
    Optimiser,
    Recipe,
    WrittenCritic,
    WrittenEval,
    WrittenKl,
    WrittenRl,
)
from posttrain.config.specs import (
    MODEL_REWARD,
    NO_CORRECTION,
    check_model,
    complete,
    complete_env,
    complete_reward,
    complete_task,
    correction_table,
    engine_names,
    engine_table,
    tracker_table,
)
from posttrain.registry import Function

MAX_RESAMPLES = 8
EVALUATE_PROBLEMS = 100
MAX_NEW_TOKENS = 256
TEST_SHARE = 0.1
HORIZON = 10_000
# The critic's learning rate over the policy's: its head starts untrained, and its errors do less
# harm.
CRITIC_RATE = 10

# The learning rate of an adapter over that of all weights: "LoRA Without Regret" (Schulman et al.
# 2025) finds the best one about ten times as high, at every rank.
ADAPTER_RATE = 10
Learning = TypeVar("Learning", bound=Optimiser)


def resolve(recipe: Recipe, *, supplied: Collection[str] = ()) -> Resolved:
    """The recipe with every default filled in and every rule checked; resolving twice is the same.

    ``supplied`` names parts that the caller hands over as Python objects: they are not looked for
    in the recipe.
    """
    if isinstance(recipe, Resolved):
        return recipe
    resolved = _filled(recipe, supplied)
    idle = without_effect(resolved, NO_EFFECT)
    if dropped := _dropped(recipe, idle, table=NO_EFFECT, supplied=supplied):
        return resolve(dropped, supplied=supplied)
    _raise([*idle, *broken_rules(resolved, supplied=supplied)], recipe)
    # This loads torch, which takes seconds: last, so that other mistakes are reported at once.
    return _tried(resolved, supplied) if "rl" in recipe.stages else resolved


def _dropped(
    recipe: Recipe,
    idle: Mapping[str, list[str]],
    *,
    table: Sequence[OnlyWith],
    supplied: Collection[str],
) -> Recipe | None:
    """The recipe without keys of its file that have no effect only because of the command line."""
    if recipe._file is None or not idle:
        return None
    try:
        before = without_effect(_filled(recipe._file, supplied), table).values()
    except ConfigError:
        return None
    kept = {*recipe._overrides, *(key for keys in before for key in keys)}
    dropped = [key for keys in idle.values() for key in keys if not _touches(key, kept)]
    for key in dropped:
        recipe = left_out(recipe, key)
        why = "left out, because the command line leaves it without effect"
        recipe._notes = (*recipe.notes, f"{key}: {why}; drop it from the recipe")
    return recipe if dropped else None


def _touches(key: str, others: Collection[str]) -> bool:
    both = ((f"{key}.", f"{other}.") for other in others)
    return any(one.startswith(other) or other.startswith(one) for one, other in both)


def _filled(recipe: Recipe, supplied: Collection[str]) -> Resolved:
    """The recipe with every default, except those that depend on facts of pieces."""
    if not recipe.stages:
        known = ", ".join(f"[{stage}]" for stage in STAGES)
        problem = f"no stage to run; add a section ({known}), or set run.stages"
        raise ConfigError([problem], source=recipe.source)
    sections: dict[str, Any] = {
        "run": RunSection(**{**dict(recipe.run), "stages": recipe.stages}),
        "model": recipe.model,
        "adapter": recipe.adapter,
        "task": recipe.task,
        "rewards": recipe.rewards,
        "grading": recipe.grading,
        "environment": recipe.environment,
        "cluster": recipe.cluster,
        "teacher": recipe.teacher,
        "sweep": recipe.sweep,
    }
    makers: dict[str, Callable[[], Any]] = {
        "sft": lambda: _with_rate(recipe, recipe.sft or SftSection()),
        "prefer": lambda: _prefer(recipe),
        "reward": lambda: _reward(recipe),
        "dpo": lambda: _dpo(recipe),
        "rl": lambda: resolve_rl(_with_rate(recipe, recipe.rl or WrittenRl())),
        "eval": lambda: _eval(recipe),
    }
    makers = {stage: make for stage, make in makers.items() if stage in recipe.stages}
    alone = (recipe.task or {}).keys() == {"env"}  # beside prompts that are an object, or [sft]
    if recipe.task is not None and "task" not in supplied and not alone:
        named = None if "rewards" in supplied else recipe.rewards
        makers["task"] = lambda: complete_task(recipe.task or {}, rewards=named)
    elif recipe.task:
        makers["task"] = lambda: complete_env(recipe.task or {})
    if recipe.rewards or "rewards" not in supplied:
        makers["rewards"] = lambda: _rewards(recipe.rewards)

    def fill(name: str) -> Callable[[], None]:
        return lambda: sections.update({name: makers[name]()})

    order = ("task", "rewards", *STAGES)
    steps: list[Callable[[], object]] = [
        lambda: check_model(recipe.model),
        lambda: _check_trackers(recipe),
        lambda: _given_once(recipe, supplied),
        *(fill(name) for name in order if name in makers),
    ]
    if "rl" in recipe.stages and "engine" not in supplied:
        rl = recipe.rl or WrittenRl()
        steps.append(lambda: _engine(rl, recipe.cluster, table=engine_names()))
    collect(steps, source=recipe.source)
    # Sections of stages that are not run get no defaults, so that none passes for a written value.
    resolved = Resolved.model_construct(**sections)
    resolved._source, resolved._notes, resolved._written = recipe.source, recipe.notes, recipe
    return resolved


def _check_trackers(recipe: Recipe) -> None:
    for spec in recipe.run.trackers:
        given = {"name": spec} if isinstance(spec, str) else spec
        complete(given, {}, table=tracker_table(), key="run.trackers")


def _tried(recipe: Resolved, supplied: Collection[str]) -> Resolved:
    """The recipe with critic, penalty and engine, for which the pieces of ``[rl]`` are loaded."""
    from posttrain.config.piece_facts import advantage_needs, loss_facts, probe

    rl, row = recipe.rl, algorithm_row(recipe.rl)
    idle = without_effect(recipe, NO_EFFECT_OF_PIECES)
    if dropped := _dropped(recipe.written, idle, table=NO_EFFECT_OF_PIECES, supplied=supplied):
        return resolve(dropped, supplied=supplied)
    if loss_facts(rl).steered:
        rl = rl.model_copy(update={"penalty_target": rl.penalty_target or row.penalty_target})
    _raise([*idle, *broken_piece_rules(recipe.model_copy(update={"rl": rl}))], recipe)
    if rl.critic is None and "values" in advantage_needs(rl):
        rl = rl.model_copy(update={"critic": _critic(rl, row)})
    collect(probe(rl), source=recipe.source)
    if "engine" not in supplied:
        rl = rl.model_copy(update={"engine": _engine(rl, recipe.cluster, table=engine_table())})
        _raise(broken_engine_rules(rl), recipe)
    return recipe.model_copy(update={"rl": rl})


def _raise(problems: Sequence[str], recipe: Recipe) -> None:
    if problems:
        raise ConfigError(problems, source=recipe.source)


def _engine(
    rl: WrittenRl, cluster: ClusterSection | None, *, table: Mapping[str, Function]
) -> Spec:
    name = (cluster and cluster.engines and cluster.engine) or "native"
    return complete(rl.engine, {"name": name}, table=table, key="rl.engine")


def _given_once(recipe: Recipe, supplied: Collection[str]) -> None:
    given = {
        "task": {key for key in recipe.task or {} if key != "env"},
        "rewards": recipe.rewards,
        "engine": recipe.rl and recipe.rl.engine,
    }
    if set(recipe.rewards) == {MODEL_REWARD}:
        del given["rewards"]  # a reward model has no object: it stands beside functions
    twice = [part for part in supplied if given.get(part)]
    if twice:
        raise ValueError(f"{twice[0]}: given twice, by name and as an object; drop one of them")


def _rewards(given: Mapping[str, Spec], *, key: str = "rewards") -> dict[str, Spec]:
    done: dict[str, Spec] = {}

    def add(name: str, spec: Spec) -> Callable[[], None]:
        return lambda: done.update({name: complete_reward(name, spec, key=key)})

    collect([add(name, spec) for name, spec in given.items()], source="")
    return done


def _prefer(recipe: Recipe) -> PreferSection:
    section = recipe.prefer or WrittenPrefer()
    filled = {
        "rewards": _rewards(section.rewards, key="prefer.rewards"),
        "max_new_tokens": section.max_new_tokens or _limit(recipe),
    }
    return PreferSection(**{**dict(section), **filled})


def _limit(recipe: Recipe) -> int:
    return recipe.rl.max_new_tokens if recipe.rl is not None else MAX_NEW_TOKENS


def _reward(recipe: Recipe) -> RewardSection:
    section = _with_rate(recipe, recipe.reward or RewardSection())
    return section.model_copy(update=_test_share(section))


def _test_share(section: RewardSection | WrittenDpo) -> dict[str, float]:
    if section.data == "prefer" or section.test_data is not None:
        return {}
    return {"test_share": section.test_share or TEST_SHARE}


def _dpo(recipe: Recipe) -> DpoSection:
    section = _with_rate(recipe, recipe.dpo or WrittenDpo())
    given = {name: value for name, value in dict(section).items() if value is not None}
    return DpoSection(**{**direct_options(section), **given, **_test_share(section)})


def _eval(recipe: Recipe) -> EvalSection:
    section = recipe.eval or WrittenEval()
    filled = {
        "max_new_tokens": section.max_new_tokens or _limit(recipe),
        "temperature": section.temperature or 1.0,
    }
    return EvalSection(**{**dict(section), **filled})


def resolve_rl(rl: WrittenRl) -> RlSection:
    """The section ``[rl]`` with every default filled in."""
    row = algorithm_row(rl)
    buffer = max(rl.max_new_tokens // 4, 1) if row.overlong_penalty else 0
    filled: dict[str, Any] = {
        "group_size": rl.group_size or row.group_size,
        "epochs": rl.epochs or row.epochs,
        "dynamic_sampling": _first(rl.dynamic_sampling, row.dynamic_sampling),
        "max_resamples": rl.max_resamples or MAX_RESAMPLES,
        "overlong_buffer": _first(rl.overlong_buffer, buffer),
        "evaluate_problems": _first(rl.evaluate_problems, EVALUATE_PROBLEMS),
    }
    other_sampler = rl.max_lag > 0 or rl.top_k > 0 or rl.top_p < 1
    tables: dict[str, tuple[Mapping[str, Any], Mapping[str, Function]]] = {
        "advantage": (row.advantage, piece_table("advantage")),
        "loss": (row.loss, piece_table("policy loss")),
        "weights": (row.weights, piece_table("averaging")),
        "correction": (CORRECTION if other_sampler else NO_CORRECTION, correction_table()),
    }

    def add(name: str) -> Callable[[], None]:
        default, table = tables[name]
        given = _with_limit(getattr(rl, name), rl)
        spec = _with_limit(default, rl)
        return lambda: filled.update({name: complete(given, spec, table=table, key=f"rl.{name}")})

    def add_kl() -> None:
        filled["kl"] = _kl(rl.kl or WrittenKl(), row.kl)

    def add_critic() -> None:
        filled["critic"] = None if rl.critic is None else _critic(rl, row)

    collect([add_kl, *map(add, tables), add_critic], source="")
    return RlSection(**{**dict(rl), **filled})


def _critic(rl: WrittenRl, row: Algorithm) -> CriticSection:
    """The critic of a section with every default filled in."""
    given = rl.critic or WrittenCritic()
    filled = {
        "source": given.source or "policy",
        "learning_rate": given.learning_rate or times(CRITIC_RATE, rl.learning_rate),
        "loss": complete(
            given.loss,
            row.value_loss or VALUE_LOSS,
            table=piece_table("value loss"),
            key="rl.critic.loss",
        ),
    }
    return CriticSection(**{**dict(given), **filled})


def times(factor: float, rate: float) -> float:
    """``factor × rate`` as one would write it: 10 × 1e-6 is 9.999999999999999e-06 in floats.

    >>> times(10, 1e-6)
    1e-05
    """
    return float(f"{factor * rate:.12g}")


def _with_rate(recipe: Recipe, section: Learning) -> Learning:
    """The section with the learning rate of an adapter, where there is one and none is given."""
    if not recipe.adapter.rank or "learning_rate" in section.model_fields_set:
        return section
    return section.model_copy(update={"learning_rate": times(ADAPTER_RATE, section.learning_rate)})


def algorithm_row(rl: WrittenRl) -> Algorithm:
    """The row of the table that a section names."""
    try:
        return algorithm(rl.algorithm)
    except ValueError as error:
        raise ValueError(f"rl.{error}") from None


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _with_limit(piece: Any, rl: WrittenRl) -> Any:
    """A piece whose option is "max_new_tokens" (Dr. GRPO's constant), with the number in place."""
    if piece is None:
        return None
    return {k: rl.max_new_tokens if v == "max_new_tokens" else v for k, v in piece.items()}


def _kl(given: WrittenKl, row: KL) -> KlSection:
    """The algorithm's KL with what the user changed."""
    off = given.placement is None and given.coefficient == 0
    placement = given.placement or ("none" if off else row.placement)
    same = placement == row.placement
    coefficient = _first(given.coefficient, row.coefficient if same else 0.0)
    rule = given.rule or (row.rule if same else "fixed")
    target = _first(given.target, row.target if same and rule == row.rule else None)
    if placement != "none" and not coefficient:
        raise ValueError(
            f"rl.kl.coefficient: placement {placement!r} needs a coefficient above 0 (0.04, say); "
            'to do without a reference model, set rl.kl.placement to "none"'
        )
    if placement != "none" and rule != "fixed" and target is None:
        raise ValueError(f"rl.kl.target: rule {rule!r} needs the divergence to steer to, in nats")
    usual = row.estimator if same else ("k1" if placement == "reward" else "k3")
    return KlSection(
        placement=placement,
        coefficient=coefficient,
        estimator=given.estimator or usual,
        direction=given.direction or "reverse",
        weighted=bool(given.weighted),
        rule=rule,
        target=target,
        horizon=given.horizon or HORIZON,
        refresh_every=given.refresh_every or 0,
        dtype=given.dtype or "model",
        offload=bool(given.offload),
    )
