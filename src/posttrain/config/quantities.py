"""A recipe as data and as text: the dict, the TOML, what changed, and the batch arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from posttrain.config.data_stages import RewardSection, SftSection
from posttrain.config.defaults import resolve
from posttrain.config.describe import keys
from posttrain.config.fields import Section
from posttrain.config.no_effect import effective
from posttrain.config.read import plain
from posttrain.config.recipe_rules import cautions
from posttrain.config.resolved import DpoSection, EvalSection, PreferSection, Resolved, RlSection
from posttrain.config.rl_rules import optimiser_steps
from posttrain.config.sections import Recipe
from posttrain.config.toml import write_toml
from posttrain.registry import dotted


class Quantity(NamedTuple):
    """A row of the batch arithmetic: its name, its number, and how that is computed."""

    stage: str
    name: str
    value: float
    how: str


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain dicts, lists and scalars; what is not given is left out.

    ``recipe_from_dict`` reads it back as it was. Of a resolved recipe, sections whose stage is not
    run are those written, and a default without effect is left out too.
    """
    values = _values(recipe)
    if isinstance(recipe, Resolved):
        values = {**_values(recipe.written), **_values(effective(recipe))}
    empty = ("rewards", "sweep")  # tables that are left out where they hold nothing
    return {name: table for name, table in plain(values).items() if table or name not in empty}


def _values(section: Section) -> dict[str, Any]:
    given = dict(section)
    fields = {name: given[name] for name in keys(type(section)) if name in given}
    return {
        name: _values(value) if isinstance(value, Section) else value
        for name, value in fields.items()
    }


def changed_keys(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ, with both values; None where one has none.

    >>> from posttrain.config import recipe_from_dict
    >>> changed_keys(recipe_from_dict({}), recipe_from_dict({"run": {"seed": 1}}))
    {'run.seed': (0, 1)}
    """
    one, other = dotted(to_dict(first)), dotted(to_dict(second))
    keys = [*one, *(key for key in other if key not in one)]
    pairs = {key: (one.get(key), other.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML text; ``read_recipe`` reads it back as it was."""
    return write_toml(to_dict(recipe))


def render_dry_run(recipe: Recipe, *, supplied: Collection[str] = ()) -> str:
    """What a run would do: the resolved recipe as TOML, with its arithmetic in comments.

    The text is itself a recipe. ``supplied`` is that of :func:`resolve`.
    """
    resolved = resolve(recipe, supplied=supplied)
    head = [f"Resolved from {recipe.source}." if recipe.source else "Resolved."]
    rows = arithmetic(resolved)
    width = max(len(row.name) for row in rows)
    for row in rows:
        head.append(f"{row.stage:<6}  {row.name:<{width}}  {row.value:>9,}  {row.how}")
    head += [f"Caution: {caution}" for caution in cautions(resolved)]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return f"{comments}\n{write_toml(to_dict(resolved), comments=_notes(resolved))}"


def _notes(recipe: Recipe) -> dict[str, str]:
    """Comments on what ``auto`` means on this machine."""
    notes = {}
    device = recipe.run.device
    if device == "auto":
        import torch  # only to see whether there is a GPU

        device = "cuda" if torch.cuda.is_available() else "cpu"
        notes["run.device"] = f"{device} on this machine"
    if recipe.model.compute == "auto":
        notes["model.compute"] = "bfloat16" if device == "cuda" else recipe.model.dtype
    return notes


def arithmetic(recipe: Resolved, *, num_prompts: int | None = None) -> list[Quantity]:
    """The batch arithmetic of a resolved recipe, stage by stage: every kind of batch, once.

    With ``num_prompts``, the train prompts of its task, also how often rl goes through them.
    """
    rows: list[Quantity] = []
    for stage in recipe.stages:
        if stage == "sft":
            rows += _sft(recipe.sft)
        elif stage == "prefer":
            rows += _prefer(recipe.prefer)
        elif stage == "reward":
            rows += _ranked("reward", recipe.reward)
        elif stage == "dpo":
            rows += _ranked("dpo", recipe.dpo)
        elif stage == "rl":
            rows += _rl(recipe.rl, turns="env" in (recipe.task or {}))
            rows += _passes(recipe.rl, num_prompts)
        elif stage == "eval":
            rows += _eval(recipe.eval)
    return rows


def _sft(sft: SftSection) -> list[Quantity]:
    rows = [Quantity("sft", "sequences per optimiser step", sft.batch_size, "batch_size")]
    if sft.steps is not None:
        rows.append(Quantity("sft", "optimiser steps in all", sft.steps, "steps"))
    elif sft.num_demonstrations is not None:
        total = sft.epochs * -(-sft.num_demonstrations // sft.batch_size)
        demonstrations = _count(sft.num_demonstrations, "demonstration")
        how = f"{_count(sft.epochs, 'epoch')} × {demonstrations} ÷ {sft.batch_size}, rounded up"
        rows.append(Quantity("sft", "optimiser steps in all", total, how))
    return [*rows, *_budget("sft", sft.micro_batch_tokens)]


def _prefer(prefer: PreferSection) -> list[Quantity]:
    drawn = prefer.samples * prefer.repeats
    how = f"{_count(prefer.samples, 'sample')} × {_count(prefer.repeats, 'repeat')}"
    rows = [Quantity("prefer", "completions per prompt", drawn, how)]
    if prefer.num_prompts is not None:
        prompts = _count(prefer.num_prompts, "prompt")
        total = prefer.num_prompts * drawn
        rows.append(Quantity("prefer", "train completions, at most", total, f"{prompts} × {drawn}"))
    return rows


def _ranked(stage: str, section: RewardSection | DpoSection) -> list[Quantity]:
    size = section.batch_size
    rows = [Quantity(stage, "pairs or sets per optimiser step", size, "batch_size")]
    return [*rows, *_budget(stage, section.micro_batch_tokens)]


def _rl(rl: RlSection, *, turns: bool) -> list[Quantity]:
    """With ``turns`` an environment decides how often the policy speaks in a rollout."""
    from posttrain.config.piece_facts import wants_greedy

    kept, updates, again = rl.prompts_per_step * rl.group_size, optimiser_steps(rl), _draws(rl)
    rollouts, steps = _count(kept, "rollout"), _count(rl.steps, "step")
    minibatches = _count(rl.minibatches, "minibatch", plural="es")
    group = f"{_count(rl.prompts_per_step, 'prompt')} × {_count(rl.group_size, 'completion')}"
    sampled = kept * again
    source = rollouts if again == 1 else f"{sampled} sampled"
    each = " and turn" if turns else ""
    rows = [Quantity("rl", "rollouts per step", kept, group)]
    if wants_greedy(rl):
        asked = rl.prompts_per_step * again
        name, which = ("", "") if again == 1 else (", at most", " that are drawn")
        how = f"one for each of {_count(asked, 'prompt')}{which}: its baseline"
        rows.append(Quantity("rl", f"greedy completions per step{name}", asked, how))
    if again > 1:
        how = f"{rollouts} × (1 + {_count(again - 1, 'resample')})"
        rows.append(Quantity("rl", "sampled per step, at most", sampled, how))
    totals = {
        f"new tokens per step{each}, at most": (
            sampled * rl.max_new_tokens,
            f"{source} × {_count(rl.max_new_tokens, 'token')}",
        ),
        "optimiser steps per batch": (updates, f"{_count(rl.epochs, 'epoch')} × {minibatches}"),
        "sequences per optimiser step": (kept // rl.minibatches, f"{rollouts} ÷ {minibatches}"),
        "rollouts in all": (rl.steps * kept, f"{steps} × {rollouts}"),
    }
    if again > 1:
        totals["sampled in all, at most"] = (rl.steps * sampled, f"{steps} × {source}")
    totals["optimiser steps in all"] = (rl.steps * updates, f"{steps} × {updates} per batch")
    rows += [Quantity("rl", name, value, how) for name, (value, how) in totals.items()]
    return [*rows, *_budget("rl", rl.micro_batch_tokens)]


def _draws(rl: RlSection) -> int:
    """How often a group is drawn at most, where those without signal are drawn again."""
    return 1 + rl.max_resamples if rl.dynamic_sampling else 1


def in_passes(count: float) -> float:
    """A number of passes to one decimal, or, where that is 0, to one digit.

    >>> in_passes(2.04), in_passes(0.034)
    (2.0, 0.03)
    """
    return round(count, 1) or float(f"{count:.1g}")


def _passes(rl: RlSection, num_prompts: int | None) -> list[Quantity]:
    if not num_prompts:
        return []
    asked = f"{_count(rl.steps, 'step')} × {_count(rl.prompts_per_step, 'prompt')}"
    ends = {1: ""} if _draws(rl) == 1 else {1: ", at least", _draws(rl): ", at most"}
    return [
        Quantity(
            "rl",
            f"passes over the prompts{end}",
            in_passes(rl.steps * rl.prompts_per_step * draws / num_prompts),
            f"{asked}{f' × {draws}' if draws > 1 else ''} ÷ {num_prompts:,}",
        )
        for draws, end in ends.items()
    ]


def _eval(section: EvalSection) -> list[Quantity]:
    answers = 1 + section.samples
    drawn = _count(section.samples, "sample")
    how = f"{_count(section.problems, 'problem')} × (1 greedy + {drawn})"
    return [Quantity("eval", "completions, at most", section.problems * answers, how)]


def _budget(stage: str, tokens: int | str) -> list[Quantity]:
    """The token budget where it is a number: "auto" is only known once the model is loaded."""
    if isinstance(tokens, str):
        return []
    return [Quantity(stage, "tokens per forward pass", tokens, "memory and speed, not the result")]


def _count(number: int, noun: str, *, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
