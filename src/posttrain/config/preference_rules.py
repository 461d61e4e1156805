"""Rules of ``[prefer]``, ``[reward]``, ``[dpo]`` and of reward models; see ``recipe_rules``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.algorithms.table import piece_table
from posttrain.config.data_stages import WrittenDpo
from posttrain.config.resolved import Resolved
from posttrain.config.specs import MODEL_REWARD, OWN_STAGE
from posttrain.data.conventions import Form, check_columns
from posttrain.data.hub_rows import is_hub_id
from posttrain.data.row_objects import HANDED_OVER
from posttrain.registry import FILES, did_you_mean, options

READ_AS: dict[str, Form] = {"sft": "demonstrations", "reward": "preferences", "dpo": "preferences"}


def preferences_missing(recipe: Resolved) -> str | None:
    """reward.data and dpo.data are "prefer" with that stage before, or a file that exists."""
    return next(filter(None, (_missing(recipe, stage) for stage in ("reward", "dpo"))), None)


def _missing(recipe: Resolved, stage: Literal["reward", "dpo"]) -> str | None:
    if stage not in recipe.stages:
        return None
    for name in ("data", "test_data"):
        value = getattr(getattr(recipe, stage), name)
        if value is None:
            continue
        if value == "prefer" and name == "data":
            if _before("prefer", stage, stages=recipe.stages):
                continue
            return (
                f'{stage}.data: "prefer", but no stage prefer runs before; add [prefer], or give a '
                f"file: --{stage}.data pairs.jsonl"
            )
        if missing := no_data(value, words=["prefer"] if name == "data" else []):
            return f"{stage}.{name}: {missing}"
    return None


def no_data(value: str, *, words: Sequence[str] = ()) -> str:
    """What is wrong with the name of data that is nowhere; "" where it may be somewhere.

    ``words`` are values of the key that are no files.
    """
    path = Path(value).expanduser()
    if path.exists() or is_hub_id(value) or value.startswith(HANDED_OVER):
        return ""
    kinds = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}
    files = sorted(item for item in path.parent.glob("*") if item.suffix in kinds)
    near = [*(str(path.parent / item.name) for item in files), *words]
    hint = did_you_mean(value, near, most=FILES) if near else f"no data in {path.parent} either"
    other = "".join(f' and not "{word}"' for word in words)
    return f"no file {value!r} (seen from {Path.cwd()}){other}; {hint}"


def direct_options(dpo: WrittenDpo) -> dict[str, Any]:
    """The options that the loss of ``[dpo]`` has, with their defaults."""
    known = options(piece_table("preference loss")[dpo.loss]).items()
    return {name: option.default for name, option in known if name in type(dpo).model_fields}


def reward_model_missing(recipe: Resolved) -> str | None:
    """A reward model named by its stage is made earlier in the same run."""
    given = recipe.rewards.get(MODEL_REWARD)
    later = [stage for stage in recipe.stages if stage in ("rl", "eval")]
    if given is not None and given.get("path", OWN_STAGE) == OWN_STAGE:
        for stage in later:
            if not _before("reward", stage, stages=recipe.stages):
                return (
                    f'rewards.model.path: "{OWN_STAGE}" is the stage of this run, and it does not '
                    f"run before {stage}; name the folder of a reward model, or add [reward]"
                )
    return None


def annotator_is_the_model(recipe: Resolved) -> str | None:
    """prefer judges before the stage reward has made a model."""
    if "prefer" not in recipe.stages:
        return None
    given = recipe.prefer.rewards.get(MODEL_REWARD)
    if given is not None and given.get("path", OWN_STAGE) == OWN_STAGE:
        return (
            "prefer.rewards.model.path: the stage reward learns from these preferences, so it "
            "cannot judge them; name the folder of another reward model"
        )
    weights = [reward["weight"] for reward in recipe.prefer.rewards.values()]
    if weights and not any(weights):
        return "prefer.rewards: every weight is 0, so nothing is preferred; give one another weight"
    return None


def sample_without_a_partner(recipe: Resolved) -> str | None:
    """prefer.samples can be divided into pairs, unless all are ranked."""
    if "prefer" not in recipe.stages or recipe.prefer.ranked or recipe.prefer.samples % 2 == 0:
        return None
    return (
        f"prefer.samples: of {recipe.prefer.samples} completions one is left without a partner; "
        "set an even number, or prefer.ranked to true"
    )


def critic_source_missing(recipe: Resolved) -> str | None:
    """rl.critic.source is "policy", "reward" with that stage before it, or a model."""
    critic = recipe.rl.critic if "rl" in recipe.stages else None
    if critic is None or critic.source != OWN_STAGE:
        return None
    if _before("reward", "rl", stages=recipe.stages):
        return None
    return (
        'rl.critic.source: "reward" is the stage of this run, and it does not run before rl; name '
        'the folder of a reward model, or use "policy"'
    )


def _before(first: str, second: str, *, stages: tuple[str, ...]) -> bool:
    return first in stages and stages.index(first) < stages.index(second)


def environment_without_a_part(recipe: Resolved) -> str | None:
    """prefer compares single answers, so it knows no environment."""
    if "prefer" in recipe.stages and (recipe.task or {}).get("env") is not None:
        return (
            "task.env: the stage prefer compares single answers and knows no replies to them; drop "
            "task.env, or [prefer]"
        )
    return None


def columns_unknown(recipe: Resolved) -> str | None:
    """The columns that sft, reward and dpo map are columns of what they learn from."""
    for stage, form in READ_AS.items():
        try:
            check_columns(form, getattr(recipe, stage).columns if stage in recipe.stages else None)
        except ValueError as error:
            return f"{stage}.{error}"
    return None


PREFERENCE_RULES: list[Callable[[Resolved], str | None]] = [
    preferences_missing,
    reward_model_missing,
    annotator_is_the_model,
    sample_without_a_partner,
    critic_source_missing,
    environment_without_a_part,
]
