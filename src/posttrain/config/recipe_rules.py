"""Rules that need more than one key: each is a function with one message, and the docs list them.

A rule takes a resolved recipe, or a section whose stage is run, and returns what is wrong or None;
cautions do not stop a run. To add one, write the function and name it in its table: its docstring
goes into the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.data_stages import Optimiser, RewardSection, SftSection, WrittenDpo
from posttrain.config.preference_rules import PREFERENCE_RULES, columns_unknown, no_data
from posttrain.config.resolved import Resolved, RlSection
from posttrain.config.rl_rules import ENGINE_RULES, PIECE_RULES, RL_CAUTIONS, RL_RULES
from posttrain.config.sections import WrittenRl
from posttrain.config.usual import unusual
from posttrain.registry import split

NO_WEIGHT = "every weight is 0, so nothing can be learned; give one another weight"

# ------------------------------------------------------------------------------- every recipe


def repeated_names(recipe: Resolved) -> str | None:
    """A stage or a tracker is listed once."""
    for key in ("stages", "trackers"):
        names = [split(spec, kind=f"run.{key}")[0] for spec in getattr(recipe.run, key)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            return f"run.{key}: {twice!r} is listed twice; name each once"
    return None


def compute_above_weights(recipe: Resolved) -> str | None:
    """model.compute = "float32" needs weights in float32."""
    if recipe.model.dtype == "bfloat16" and recipe.model.compute == "float32":
        return 'model.compute: float32 needs model.dtype = "float32" (the default)'
    return None


def task_missing(recipe: Resolved) -> str | None:
    """prefer, rl, eval, and sft without a file of its own, need a task."""
    own_data = "sft" in recipe.stages and recipe.sft.data != "task"
    able = ["reward", "dpo"] + ["sft"] * own_data
    needy = [stage for stage in recipe.stages if stage not in able]
    if (recipe.task or {}).get("name") is None and needy:
        stages = " and ".join(needy)
        fix = 'write [task] with name = "..."; from Python, give prompts=… or task=…'
        return f"task: missing, but required by {stages}: {fix}"
    return None


def engines_differ(recipe: Resolved) -> str | None:
    """cluster.engine and rl.engine name the same engine where both are given."""
    rl, name = recipe.for_evaluations, recipe.cluster and recipe.cluster.engine
    other = None if rl is None or rl.engine is None else rl.engine.get("name")
    if name and other and name != other:
        return f"cluster.engine: {name!r}, and rl.engine is {other!r}; drop one of them"
    return None


def rewards_without_weight(recipe: Resolved) -> str | None:
    """At least one reward has a weight that is not 0, unless there is an environment to score."""
    weights = [reward["weight"] for reward in recipe.rewards.values()]
    scored = (recipe.task or {}).get("env") is not None
    if "rl" in recipe.stages and weights and not any(weights) and not scored:
        return f"rewards: {NO_WEIGHT}"
    return None


def best_without_measure(recipe: Resolved) -> str | None:
    """run.keep_best goes by evaluations of [rl] that fall together with its checkpoints."""
    if not recipe.run.keep_best or "rl" not in recipe.stages:
        return None
    rl = recipe.rl
    if not rl.evaluate_every or not rl.save_every or rl.save_every % rl.evaluate_every:
        saves = "by time" if rl.save_every is None else f"every {rl.save_every}"
        return (
            f"run.keep_best: what a checkpoint is worth is measured at its own step, and rl saves "
            f"{saves} and evaluates every {rl.evaluate_every} (0 is off); set "
            "rl.save_every to a multiple of rl.evaluate_every, or run.keep_best to 0"
        )
    return None


def environment_beside_parts(recipe: Resolved) -> str | None:
    """Partial rollouts are of one turn."""
    named = (recipe.task or {}).get("env")
    if "rl" in recipe.stages and recipe.rl.partial > 1 and named is not None:
        return (
            "rl.partial: completions that an environment replies to are sampled by one version of "
            "the weights; set rl.partial to 1"
        )
    return None


def environment_nowhere(recipe: Resolved) -> str | None:
    """[environment] says how task.env is run, and leaves room for a turn of each stage."""
    section, named = recipe.environment, (recipe.task or {}).get("env")
    given = sorted(section.model_fields_set)
    if named is None and any(getattr(section, k) != getattr(type(section)(), k) for k in given):
        return f"environment.{given[0]}: no environment is named; set task.env, or drop it"
    for stage in ("rl", "eval"):
        if named is None or stage not in recipe.stages or not section.max_tokens:
            continue
        longest = getattr(recipe, stage).max_new_tokens
        if section.max_tokens < longest:
            return (
                f"environment.max_tokens: {section.max_tokens} leaves no room for one turn of "
                f"{stage}.max_new_tokens = {longest}; raise it, or set 0"
            )
    return None


def engines_nowhere(recipe: Resolved) -> str | None:
    """cluster.engines are processes of a Ray cluster, which cluster.address names."""
    section = recipe.cluster
    if section is not None and section.engines and section.address is None:
        return (
            "cluster.engines: engines are processes of a Ray cluster; set cluster.address "
            '("local" starts one for the run), or drop them'
        )
    return None


def quantized_in_vllm(recipe: Resolved) -> str | None:
    """vLLM would sample from a base that is not quantised."""
    rl, cluster = recipe.for_evaluations, recipe.cluster
    engines = [None if rl is None or rl.engine is None else rl.engine.get("name")]
    engines += [None if cluster is None else cluster.engine]
    if recipe.adapter.quantize == "none" or "vllm" not in engines:
        return None
    return (
        "adapter.quantize: vLLM would sample beside weights that are not quantised, and so from "
        'another policy; set rl.engine to "native", or adapter.quantize to "none"'
    )


def decay_of_everything(recipe: Resolved) -> str | None:
    """learning_rate × weight_decay is below 1: each step takes that share off every weight."""
    for stage, section in _learning(recipe).items():
        share = section.learning_rate * section.weight_decay
        if share >= 1:
            return (
                f"{stage}.weight_decay: {section.weight_decay:g} × {stage}.learning_rate = "
                f"{section.learning_rate:g} takes {share:g} of every weight off at each step; set "
                f"it below {1 / section.learning_rate:g} (0.01 and 0.1 are usual)"
            )
    return None


def _learning(recipe: Resolved) -> dict[str, Optimiser]:
    """The sections of the stages that train, where they are run."""
    stages = ("sft", "reward", "dpo", "rl")
    return {name: getattr(recipe, name) for name in stages if name in recipe.stages}


# ---------------------------------------------------------------------- several adapters

# What adapters of one run may differ in: not the base, nor what samples, nor the adapter's shape.
FREE = ("run.seed", "adapter.alpha", "rl", "rewards")
FIXED = ("rl.adapters", "rl.engine", "rl.max_lag")


def trains_several(recipe: Resolved) -> bool:
    """Whether a recipe asks for more than one adapter."""
    return "rl" in recipe.stages and bool(recipe.sweep or recipe.rl.adapters > 1)


def row_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a row of the sweep, dotted; a piece with options is one key."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value and "name" not in value:
            yield from row_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def several_adapters(recipe: Resolved) -> str | None:
    """rl.adapters and [[sweep]] train adapters on one base, by the native engine in one process."""
    key = "sweep" if recipe.sweep else "rl.adapters"
    if "rl" not in recipe.stages:
        return (
            "sweep: its rows are for the stage rl; add [rl], or drop it" if recipe.sweep else None
        )
    engine = (recipe.rl.engine or {}).get("name", "native")
    early = [stage for stage in recipe.stages if stage not in ("rl", "eval")]
    refused = {
        "several policies share one base only as adapters; set adapter.rank": (
            not recipe.adapter.rank
        ),
        f"{', '.join(early)} would be done by each adapter for itself; run it first, and give its "
        "run as model.name": early,
        "adapters are sampled together by the engine native alone; drop rl.engine": (
            engine != "native"
        ),
        "adapters wait for each other at every step; set rl.max_lag to 0": recipe.rl.max_lag,
        "adapters of one batch learn in one process; drop [cluster]": recipe.cluster is not None,
    }
    found = next((why for why, holds in refused.items() if holds), None)
    return f"{key}: {found}" if found and trains_several(recipe) else None


def sweep_rows(recipe: Resolved) -> str | None:
    """A row of [[sweep]] changes run.seed, adapter.alpha, and keys of [rl] and [rewards]."""
    for number, row in enumerate(recipe.sweep):
        for key in row_keys(row):
            within = [name for name in (*FREE, *FIXED) if f"{key}.".startswith(f"{name}.")]
            if not within or set(within) & set(FIXED):
                return (
                    f"sweep: row {number} changes {key}, which the adapters of a run share; rows "
                    f"may change {', '.join(FREE)}"
                )
    return None


def bases_of_seeds(recipe: Resolved) -> str | None:
    """The weights of tiny are drawn by run.seed, unless model.options.seed says otherwise."""
    if "rl" not in recipe.stages or recipe.model.name != "tiny" or not trains_several(recipe):
        return None
    own = {"seed": recipe.run.seed}
    given = [row.get("run") for row in recipe.sweep]  # unchecked: each row becomes a recipe later
    seeds = {str((own | each if isinstance(each, dict) else own)["seed"]) for each in given}
    if "seed" not in recipe.model.options and (recipe.rl.adapters > 1 or len(seeds) > 1):
        return (
            "model.name: tiny draws its weights by run.seed, so every seed would have another "
            "base; set model.options.seed, or train a model first"
        )
    return None


# ------------------------------------------------------------------------------------- [sft]


def demonstrations_missing(sft: SftSection) -> str | None:
    """sft.data and sft.test_data are files or folders that exist, or hub ids."""
    for name, words in (("data", ["task"]), ("test_data", [])):
        value = getattr(sft, name)
        if value is not None and value not in words and (missing := no_data(value, words=words)):
            return f"sft.{name}: {missing}"
    return None


def sft_warmup_too_long(sft: SftSection) -> str | None:
    """sft.warmup_steps are no more than the optimiser steps of the stage, where they are known."""
    if sft.num_demonstrations is None and sft.steps is None:
        return None
    epoch = -(-(sft.num_demonstrations or 0) // sft.batch_size)
    total = sft.steps or sft.epochs * epoch
    if sft.warmup_steps > total:
        have = f"{total} optimiser step{'s' if total != 1 else ''}"
        return f"sft.warmup_steps: {sft.warmup_steps}, but sft takes {have}; set it to less"
    return None


# --------------------------------------------------------------------------------- [teacher]


def teacher_missing(recipe: Resolved) -> str | None:
    """A piece of rl that asks a teacher has one: teacher.model."""
    from posttrain.config.piece_facts import pieces_that_ask_a_teacher

    asking = pieces_that_ask_a_teacher(recipe.rl)
    if asking and not (recipe.teacher and recipe.teacher.model):
        return (
            f"teacher.model: missing, but required by {' and '.join(asking)}: write "
            '[teacher] with model = "FOLDER", a model with the policy\'s tokenizer'
        )
    return None


def divergence_over_ranks(recipe: Resolved) -> str | None:
    """A loss of whole distributions needs the teacher's head whole: cluster.learners is 1."""
    from posttrain.config.piece_facts import loss_facts

    if loss_facts(recipe.rl).divergence and recipe.cluster and recipe.cluster.learners > 1:
        return (
            f"rl.loss: {recipe.rl.loss['name']!r} compares whole distributions, which takes both "
            f"models whole, and cluster.learners = {recipe.cluster.learners} shards them; set it "
            "to 1, or rl.algorithm to distill, whose teacher may be sharded"
        )
    return None


# ---------------------------------------------------------------------------------- cautions


def update_lost_in_rounding(recipe: Resolved) -> str | None:
    """Weights in bfloat16 lose small updates."""
    kept = recipe.model.dtype == "bfloat16" and not recipe.adapter.rank  # these are in float32
    if kept and any(each.learning_rate < 1e-4 for each in _learning(recipe).values()):
        return "model.dtype: in bfloat16 updates below 1/256 of a weight vanish; use float32"
    return None


SMALL = 50e6  # bytes; what is trained from nothing learns at higher rates
# Rates at which all weights learn by default, and from which a rate is one for adapters.
FULL_RATES = {
    "sft": (SftSection().learning_rate, 2e-4),
    "reward": (RewardSection().learning_rate, 2e-4),
    "dpo": (WrittenDpo().learning_rate, 5e-5),
    "rl": (WrittenRl().learning_rate, 5e-5),
}


def _is_small(model: str) -> bool:
    """Whether it is the tiny model, or a folder of weights that take no more than a few MB."""
    weights = [path.stat().st_size for path in Path(model).glob("*.safetensors")]
    return model == "tiny" or 0 < sum(weights) < SMALL


def rate_of_the_other_kind(recipe: Resolved) -> str | None:
    """An adapter learns at about ten times the rate of all weights; small models at any."""
    for stage, section in _learning(recipe).items():
        rate, (full, high) = section.learning_rate, FULL_RATES[stage]
        if recipe.adapter.rank and rate <= 2 * full:
            return (
                f"{stage}.learning_rate: {rate:g} is a rate for all weights; an adapter learns "
                f"best at about ten times that: drop it (the default is {10 * full:g}), or raise it"
            )
        if not recipe.adapter.rank and rate >= high and not _is_small(recipe.model.name):
            return (
                f"{stage}.learning_rate: {rate:g} is a rate for adapters, and here all weights "
                f"learn; about {full:g} is usual, or set adapter.rank"
            )
    return None


def adapter_of_nothing(recipe: Resolved) -> str | None:
    """The weights of "tiny" are random: an adapter on top of them learns almost nothing."""
    if recipe.adapter.rank and recipe.model.name == "tiny":
        return (
            'adapter.rank: the weights of "tiny" are random, and an adapter on top of them '
            "learns almost nothing; train all weights first (adapter.rank = 0), then use that model"
        )
    return None


RECIPE_RULES: list[Callable[[Resolved], str | None]] = [
    decay_of_everything,
    repeated_names,
    compute_above_weights,
    task_missing,
    engines_nowhere,
    environment_nowhere,
    environment_beside_parts,
    engines_differ,
    rewards_without_weight,
    best_without_measure,
    quantized_in_vllm,
    several_adapters,
    sweep_rows,
    bases_of_seeds,
    columns_unknown,
]
SFT_RULES: list[Callable[[SftSection], str | None]] = [demonstrations_missing, sft_warmup_too_long]
TEACHER_RULES: list[Callable[[Resolved], str | None]] = [teacher_missing, divergence_over_ranks]
RECIPE_CAUTIONS: list[Callable[[Resolved], str | None]] = [
    update_lost_in_rounding,
    rate_of_the_other_kind,
    adapter_of_nothing,
]


def broken_rules(recipe: Resolved, *, supplied: Collection[str] = ()) -> list[str]:
    """What the rules find in a resolved recipe; sections whose stage is not run are left alone."""
    elsewhere = {"task": task_missing, "rewards": rewards_without_weight}
    left_out = [rule for part, rule in elsewhere.items() if part in supplied]
    found = [rule(recipe) for rule in RECIPE_RULES if rule not in left_out]
    found += [rule(recipe) for rule in PREFERENCE_RULES]
    if "sft" in recipe.stages:
        found += [rule(recipe.sft) for rule in SFT_RULES]
    if "rl" in recipe.stages:
        found += [rule(recipe.rl) for rule in RL_RULES]
    return [problem for problem in found if problem]


def broken_piece_rules(recipe: Resolved) -> list[str]:
    """What the rules about the pieces of ``[rl]`` find, once they are loaded."""
    found = [*(rule(recipe.rl) for rule in PIECE_RULES), *(rule(recipe) for rule in TEACHER_RULES)]
    return [problem for problem in found if problem]


def broken_engine_rules(rl: RlSection) -> list[str]:
    """What the rules about the engine find, once it is known."""
    return [problem for rule in ENGINE_RULES if (problem := rule(rl))]


def cautions(recipe: Resolved) -> list[str]:
    """Warnings about a resolved recipe that can be run, but may not be what is meant."""
    found = [*recipe.notes, *(rule(recipe) for rule in RECIPE_CAUTIONS), *unusual(recipe)]
    if "rl" in recipe.stages:
        found += [rule(recipe.rl) for rule in RL_CAUTIONS]
    return [caution for caution in found if caution]
