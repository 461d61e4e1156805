"""Keys that have no effect beside others: when, and what to do, in the words of the error.

A key that is given and has no effect is refused, unless only an override of the command line makes
it so: then it is dropped, with a note. Defaults without effect are not shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from posttrain.config.describe import find_field
from posttrain.config.fields import STAGES
from posttrain.config.preference_rules import direct_options
from posttrain.config.resolved import Resolved
from posttrain.config.sections import Recipe, WrittenKl, WrittenRl

Whole = TypeVar("Whole", bound=Recipe)
_BETA = "rl.kl.coefficient"


class OnlyWith(NamedTuple):
    """Keys of a section that only have an effect under a condition, and the error where it fails.

    In ``text``, ``{0}`` is the resolved recipe, and ``{them}`` stands for the keys.
    """

    section: str
    keys: str
    condition: Callable[[Resolved], object]
    text: str | Callable[[Resolved], str]

    def names(self) -> list[str]:
        """The keys by their dotted names."""
        return [f"{self.section}.{key}" for key in self.keys.split()]

    def __str__(self) -> str:
        text = self.text if isinstance(self.text, str) else self.text.__doc__ or ""
        plain = re.sub(r"\{0[^}]*\}", "…", text).replace("{them}", "it").rstrip(".")
        return f"{', '.join(self.names())}: {plain}."


def _no_kl(recipe: Resolved) -> str:
    """no effect without a placement."""
    given = (recipe.written.rl or WrittenRl()).kl or WrittenKl()
    why, mend = f"algorithm {recipe.rl.algorithm!r} has no KL", 'set rl.kl.placement to "loss"'
    if given.placement is not None:
        why, mend = 'rl.kl.placement is "none"', 'set it to "loss"'
    elif given.coefficient == 0:
        return (
            "no effect, because rl.kl.coefficient is 0; set a coefficient above 0, or drop {them}"
        )
    return f'no effect, because {why}; {mend} or "reward", or drop {{them}}'


def _no_values(recipe: Resolved) -> str:
    """no effect where the advantage asks for no values."""
    from posttrain.config.piece_facts import advantages_that_need

    name = recipe.rl.advantage["name"]
    own = '; if it reads values, declare it above the function: @piece(needs={{"values"}})'
    return (
        f"no effect, because the advantage {name!r} asks for no values; drop it, or set "
        f"rl.advantage to {advantages_that_need('values')} (the algorithm ppo does)"
        f"{own if ':' in name else ''}"
    )


def _no_token_rewards(recipe: Resolved) -> str:
    """not for an advantage that gives all tokens of a completion the same reward."""
    from posttrain.config.piece_facts import advantages_that_need

    known = advantages_that_need("token_rewards")
    return (
        "not for the advantage {0.rl.advantage[name]!r}; drop it, or set rl.advantage to "
        f"{known}, which give every token its own reward"
    )


def _asks_for(field: str) -> Callable[[Resolved], bool]:
    def condition(recipe: Resolved) -> bool:
        from posttrain.config.piece_facts import advantage_needs

        return field in advantage_needs(recipe.rl)

    return condition


def _taught(recipe: Resolved) -> bool:
    from posttrain.config.piece_facts import pieces_that_ask_a_teacher

    return recipe.teacher is None or bool(pieces_that_ask_a_teacher(recipe.rl))


def _has_option(name: str) -> Callable[[Resolved], bool]:
    return lambda recipe: name in direct_options(recipe.dpo)


def _counts_epochs(stage: str) -> Callable[[Resolved], bool]:
    return lambda recipe: getattr(recipe, stage).steps is None


def _steered(recipe: Resolved) -> bool:
    from posttrain.config.piece_facts import loss_facts

    return loss_facts(recipe.rl).steered


# fmt: off
NO_EFFECT = [
    OnlyWith("cluster", "engine colocate cpus_per_engine gpus_per_engine",
        lambda recipe: recipe.cluster is None or recipe.cluster.engines,
        "no effect without replicas; drop {them}, or set cluster.engines"),
    OnlyWith("cluster", "cpus_per_learner gpus_per_learner deadline",
        lambda recipe: recipe.cluster is None or recipe.cluster.address,
        'no effect without cluster.address; set it ("local" starts a cluster), or drop {them}'),
    OnlyWith("model", "system", lambda recipe: recipe.model.chat is not False,
        "no effect without a chat template; drop it, or set model.chat"),
    OnlyWith("adapter", "alpha rslora quantize targets", lambda recipe: recipe.adapter.rank,
        "no effect without adapters; drop {them}, or set adapter.rank"),
    OnlyWith("rl.kl", "dtype offload",
        lambda recipe: recipe.rl.kl.placement == "none" or not recipe.adapter.rank,
        "the reference of adapters is the model with those it began with, no copy; drop {them}"),
    OnlyWith("sft", "test_share", lambda recipe: recipe.sft.test_data is None,
        "no effect beside sft.test_data; drop one of them"),
    OnlyWith("sft", "test_share",
        lambda recipe: recipe.sft.data != "task" or recipe.sft.test_data is not None,
        "held out are the task's own test prompts; drop it"),
    OnlyWith("sft", "test_data test_share result patience",
        lambda recipe: recipe.sft.evaluate_every != 0,
        "no effect with sft.evaluate_every = 0; drop {them}, or that"),
    *(OnlyWith(stage, "epochs", _counts_epochs(stage),
        f"no effect beside {stage}.steps; drop one of them") for stage in ("sft", "reward", "dpo")),
    OnlyWith("sft", "wrong_share", lambda recipe: recipe.sft.data == "task",
        'a file is taken as it is; drop it, or set sft.data to "task"'),
    OnlyWith("reward", "test_data", lambda recipe: recipe.reward.data != "prefer",
        "prefer brings test pairs of its own; drop it"),
    OnlyWith("reward", "test_share",
        lambda recipe: recipe.reward.test_data is None or recipe.reward.data == "prefer",
        "no effect beside reward.test_data; drop one of them"),
    *(OnlyWith("dpo", option, _has_option(option),
        "the loss {0.dpo.loss!r} has none; drop it")
        for option in ("label_smoothing", "gamma", "desirable_weight", "undesirable_weight")),
    OnlyWith("dpo", "test_data", lambda recipe: recipe.dpo.data != "prefer",
        "prefer brings test pairs of its own; drop it"),
    OnlyWith("dpo", "test_share",
        lambda recipe: recipe.dpo.test_data is None or recipe.dpo.data == "prefer",
        "no effect beside dpo.test_data; drop one of them"),
    OnlyWith("rl.kl", "coefficient estimator direction weighted rule target horizon refresh_every "
        "dtype offload", lambda recipe: recipe.rl.kl.placement != "none", _no_kl),
    OnlyWith("rl.kl", "weighted",
        lambda recipe: recipe.rl.kl.placement != "reward" or not recipe.rl.kl.weighted,
        "no effect in the reward, which is found before π moves: ρ is 1; "
        'drop it, or set rl.kl.placement to "loss"'),
    OnlyWith("rl.kl", "target",
        lambda recipe: recipe.rl.kl.placement == "none" or recipe.rl.kl.rule != "fixed",
        "a fixed coefficient follows no target; "
        'set rl.kl.rule to "proportional" or "doubling", or drop the target'),
    OnlyWith("rl.kl", "horizon",
        lambda recipe: recipe.rl.kl.placement == "none" or recipe.rl.kl.rule == "proportional",
        "no effect with rule {0.rl.kl.rule!r}; "
        'drop it, or set rl.kl.rule to "proportional"'),
    OnlyWith("rl.critic", "source",
        lambda recipe: recipe.rl.critic is None or recipe.rl.critic.kind == "separate",
        "a shared critic is a head on the policy's trunk; drop it, or set "
        'rl.critic.kind to "separate"'),
    OnlyWith("rl", "max_resamples", lambda recipe: recipe.rl.dynamic_sampling,
        "no effect; drop it, or set rl.dynamic_sampling to true"),
    OnlyWith("rl", "evaluate_problems", lambda recipe: recipe.rl.evaluate_every,
        "no effect; drop it, or set rl.evaluate_every above 0"),
    OnlyWith("rl", "kl_stop", lambda recipe: recipe.rl.epochs * recipe.rl.minibatches > 1,
        "no effect, because a batch is left after one optimiser step anyway; "
        "drop it, or set rl.epochs or rl.minibatches above 1"),
    OnlyWith("eval", "temperature", lambda recipe: recipe.eval.samples,
        "no effect on the greedy answer; drop it, or set eval.samples"),
]
# These rows read facts of pieces, which loads torch.
NO_EFFECT_OF_PIECES = [
    OnlyWith("teacher", "model dtype", _taught,
        "no effect, because no piece of rl asks a teacher; drop {them}, or set rl.algorithm to "
        "distill or gkd"),
    OnlyWith("rl", "whiten_rewards", _asks_for("token_rewards"), _no_token_rewards),
    OnlyWith("rl", "critic", _asks_for("values"), _no_values),
    OnlyWith("rl", "penalty_target", _steered,
        "the loss {0.rl.loss[name]!r} has no penalty; drop it, or set rl.loss to penalised "
        "(the algorithm ppo_penalty does)"),
]
# fmt: on


def without_effect(recipe: Resolved, table: Sequence[OnlyWith]) -> dict[str, list[str]]:
    """The keys that are given and have no effect, by error message."""
    found: dict[str, list[str]] = {}
    for only, keys in _idle(recipe, table):
        if given := [key for key in keys if _value(recipe.written, key) not in (None, _unset(key))]:
            text = only.text if isinstance(only.text, str) else only.text(recipe)
            them = "it" if len(given) == 1 else "them"
            found[f"{', '.join(given)}: {text.format(recipe, them=them)}"] = given
    return found


def effective(recipe: Resolved) -> Resolved:
    """The recipe without the defaults that have no effect."""
    for _, keys in _idle(recipe, NO_EFFECT):
        for key in keys:
            recipe = left_out(recipe, key)
    return recipe


def left_out(recipe: Whole, key: str) -> Whole:
    """The recipe with a key set back to "not given"."""
    home, _, name = key.rpartition(".")
    value: object = _unset(key)
    while home:
        section = _value(recipe, home)
        value = section.model_copy(update={name: value})
        home, _, name = home.rpartition(".")
    return recipe.model_copy(update={name: value})


def _idle(recipe: Resolved, table: Sequence[OnlyWith]) -> Iterator[tuple[OnlyWith, list[str]]]:
    """The rows whose condition fails, with their keys."""
    for only in table:
        stage = only.section.partition(".")[0]
        if (stage not in STAGES or stage in recipe.stages) and not only.condition(recipe):
            # A coefficient of 0 is no mistake: it turns the KL off.
            kept = [key for key in only.names() if key != _BETA or recipe.rl.kl.coefficient]
            yield only, kept


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _unset(key: str) -> object:
    _, field = find_field(key.split("."))
    return field.default if field is not None else None
