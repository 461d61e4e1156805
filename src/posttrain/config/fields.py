"""Building blocks of a recipe's keys: types with their descriptions, defaults, limits, help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

Stage = Literal["sft", "prefer", "reward", "dpo", "rl", "eval"]
STAGES: tuple[Stage, ...] = ("sft", "prefer", "reward", "dpo", "rl", "eval")
Schedule = Literal["constant", "linear", "cosine"]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """The name of a field's type in errors and in the documentation."""

    text: str


def _as_piece(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value and {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name", ""), str):
        raise ValueError(f"must be {PIECE.text}")
    return dict(value)


def _as_rewards(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("must be a table of names and weights")
    return {name: _as_reward(name, given) for name, given in value.items()}


def _as_reward(name: str, given: Any) -> Spec:
    spec = dict(given) if isinstance(given, Mapping) else {"weight": given}
    weight = spec.pop("weight", 1.0)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight):
        raise ValueError(f"the weight of {name!r} must be a finite number, or a table with one")
    return {"weight": float(weight), **spec}


def _as_kl(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"coefficient": value}
    name = "none" if value is False else value
    return {"placement": name} if isinstance(name, str) else value


AS_KL = BeforeValidator(_as_kl)
# An adapter by its rank; one that is only asked for, adapter = true, has rank 16.
AS_ADAPTER = BeforeValidator(
    lambda v: {"rank": 16 * v if isinstance(v, bool) else v} if isinstance(v, int) else v
)
PIECE = Expected("a name, or a table with a name and options")
Piece = Annotated[Spec, BeforeValidator(_as_piece), PIECE]
OptionalPiece = Annotated[Spec | None, BeforeValidator(_as_piece), PIECE]
Rewards = Annotated[
    dict[str, Spec], BeforeValidator(_as_rewards), Expected("a table of names and weights")
]
Tokens = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    Expected('a whole number of at least 1 or "auto"'),
]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[
    tuple[_Beta, _Beta], Field(strict=False), Expected("two numbers of at least 0 and below 1")
]
# A tuple, so that a recipe is immutable; a list in TOML.
Stages = Annotated[tuple[Stage, ...], Field(strict=False)]
OptionalStages = Annotated[tuple[Stage, ...] | None, Field(strict=False)]
_OwnTracker = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
Trackers = Annotated[
    tuple[Literal["tensorboard", "wandb"] | _OwnTracker | Spec, ...],
    Field(strict=False),
    Expected('a list of "tensorboard", "wandb", "module:Class" or tables with a name and options'),
]
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False),
    Expected("a list of names"),
]
StopStrings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False),
    Expected("a list of texts that are not empty"),
]
SweepRows = Annotated[
    tuple[dict[str, Any], ...], Field(strict=False), Expected("tables of keys, [[sweep]]")
]


def key(default: Any, description: str, **limits: Any) -> Any:
    """A field with a default of its own; ``limits`` are pydantic's (``ge=1``)."""
    return Field(default=default, description=description, **limits)


def later(default: str, description: str, **limits: Any) -> Any:
    """A field that ``resolve`` fills; ``default`` describes the value in words."""
    extra: JsonDict = {"default": default}
    return Field(default=None, description=description, json_schema_extra=extra, **limits)


def rate(default: float) -> Any:
    """The learning rate, whose default is another in every stage."""
    return key(
        default, "Step size at the peak of the schedule; of adapters 10 × the default.", gt=0
    )


def schedule(default: Schedule) -> Any:
    """The schedule of the learning rate, whose default is another in every stage."""
    return key(default, "How the step size goes on from the peak.")


class Section(BaseModel):
    """A frozen table that knows all its keys; values are taken as they are, never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class AdapterSection(Section):
    """Low-rank adapters (LoRA): the model stays as it is, a small product beside it learns."""

    rank: int = key(0, "Rank of the product B·A beside each weight; 0: all weights learn.", ge=0)
    alpha: float = key(32.0, "The product counts alpha / rank times.", gt=0)
    rslora: bool = key(False, "It counts alpha / √rank times: for high ranks.")
    quantize: Literal["none", "nf4"] = key(
        "none", "Keep the weights beside them in four bits: QLoRA, by bitsandbytes."
    )
    targets: Names = key((), "Layers to adapt, by the ends of their names; none: all linear ones.")
