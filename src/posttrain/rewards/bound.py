"""A reward of a recipe with its options bound: the data it takes, and its return value, checked."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.protocols import Reward, Scorer
from posttrain.registry import check_options, look_up, options
from posttrain.rewards import REWARDS
from posttrain.types import Rollout, Score, as_number

Weight = float | Mapping[str, Any]
Kind = Literal["single", "batched", "async", "scorer"]
MAX_REASON_LENGTH = 500
MAX_DETAILS_LENGTH = 4000
LARGEST = 1e30  # larger scores would overflow when squared, and nothing could be learned
UNHEARD = ("trainer_state", "log_extra", "log_metric")  # what TRL passes beside the data
_CALLER = Path(__file__).with_name("grading.py")


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """One reward of a recipe: its options bound, and the names of the data it takes.

    ``kind`` is how it is called: with one rollout, with lists of a whole chunk (a function whose
    attribute ``batched`` is True), awaited, or as a scorer of whole batches of rollouts. One of
    ``trl``'s signature, ``f(prompts, completions, **kwargs)``, is called with lists too, and may
    say None: it does not apply. One that takes ``**kwargs`` gets ``every`` column.
    ``checks_answer``, ``maximum`` and ``longest_call`` (in seconds, of these options; 0 for none)
    are what it declares of itself, see :func:`declare`.
    """

    name: str
    weight: float
    function: Reward | Scorer
    kind: Kind = "single"
    wanted: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    every: bool = False
    trl: bool = False
    checks_answer: bool = False
    maximum: float | None = None
    longest_call: float = 0.0

    @property
    def full_marks(self) -> float | None:
        """The largest score: as declared, else 1; None for a scorer, whose scores have no bound."""
        if self.maximum is None and self.kind != "scorer":
            return 1.0
        return self.maximum

    @property
    def signature(self) -> str:
        """How it is called, where that is another way than with one completion."""
        how = "TRL's signature: lists; None where it does not apply" if self.trl else ""
        if self.kind in ("batched", "async") and not self.trl:
            how = "lists of a whole chunk" if self.kind == "batched" else "awaited"
        every = "every column by **kwargs" if self.every and not self.trl else ""
        return "; ".join(filter(None, (how, every)))

    @property
    def monitored(self) -> bool:
        """Whether its weight is 0: its score is recorded, and a failure of it breaks no rollout."""
        return self.weight == 0


def bind(key: str | Reward | Scorer, given: Weight) -> BoundReward:
    """A reward by name, function or scorer, with its weight and options; mistakes raise here."""
    name = key if isinstance(key, str) else _name(key)
    kind = f"reward {name!r}"
    function = look_up(key, REWARDS, kind="reward") if isinstance(key, str) else key
    if not callable(function) and not hasattr(function, "score"):
        raise ValueError(f"rewards: expected names, functions or scorers, got {key!r}")
    chosen = dict(given) if isinstance(given, Mapping) else {"weight": given}
    weight = chosen.pop("weight", 1.0)
    declared = _declaring(function)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
        raise ValueError(f"{kind}: the weight must be a finite number, got {weight!r}")
    facts: dict[str, Any] = {
        "name": name,
        "weight": float(weight),
        "checks_answer": getattr(declared, "checks_answer", False) is True,
        "maximum": take_maximum(function, chosen, kind=kind),
    }
    if isinstance(function, type):
        function, chosen = _made(function, chosen, kind=kind), {}
    if not callable(function):
        if chosen:
            raise ValueError(f"{kind}: a scorer has its options already, got {chosen}")
        return BoundReward(**facts, function=function, kind="scorer")
    wanted, optional, every = _wanted(function, kind)
    if "weight" in options(function):
        raise ValueError(f"{kind}: rename its option 'weight'; that word sets the reward's weight")
    check_options(function, chosen, kind=kind)
    longest_call = getattr(declared, "longest_call", None)
    trl = not {"prompts", "completions"}.isdisjoint(wanted)
    return BoundReward(
        **facts,
        longest_call=longest_call(**chosen) if longest_call is not None else 0.0,
        function=functools.partial(function, **chosen) if chosen else function,
        kind="batched" if trl else _kind(function),
        wanted=tuple(name for name in wanted if not (trl and name in UNHEARD)),
        optional=optional,
        every=every,
        trl=trl,
    )


def _declaring(function: Any) -> Any:
    """What declares the facts about a reward: of a partial, the function inside."""
    return function.func if isinstance(function, functools.partial) else function


def _made(given: type, chosen: Mapping[str, Any], *, kind: str) -> Any:
    """An instance of a class that is a reward, made with the options."""
    check_options(given, chosen, kind=kind)
    try:
        made = given(**chosen)
    except TypeError as error:
        raise ValueError(f"{kind}: cannot be made ({error}); give an instance of it") from error
    if not callable(made):
        raise ValueError(f"{kind}: its instances cannot be called; write a method __call__")
    return made


def take_maximum(function: Any, chosen: dict[str, Any], *, kind: str) -> float | None:
    """The maximum of a table of options, taken out of it; else what the function itself declares.

    A function that has an option of that name keeps it.
    """
    declared = getattr(_declaring(function), "maximum", None)
    if not callable(function) or "maximum" not in options(function):
        declared = chosen.pop("maximum", declared)
    if declared is None:
        return None
    number = isinstance(declared, numbers.Real) and not isinstance(declared, bool)
    if not number or not math.isfinite(declared):
        raise ValueError(f"{kind}: its maximum must be a finite number, got {declared!r}")
    return float(declared)


def checked(reward: BoundReward, result: Any) -> Score:
    """What a reward returned as a score: anything but a usable number or a ``Score`` is broken."""
    score = result if isinstance(result, Score) else None
    value = score.value if score is not None else result
    if score is not None and not score.ok:
        reason = f"reward {reward.name!r}: {score.reason}"
        return Score(value=0.0, state=score.state, reason=reason, details=score.details)
    try:
        number = usable(value)
        parts = {} if score is None else {str(n): usable(p) for n, p in score.parts.items()}
        tokens = () if score is None else tuple(usable(each) for each in score.token_rewards)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return broken(reward, f"returned {error}")
    most = reward.maximum
    if most is not None and number > most + 1e-9 * max(1.0, abs(most)):
        mend = "fix the reward, or declare the most that it can give"
        return broken(reward, f"returned {number:g}, above its maximum of {most:g}; {mend}")
    reason = "" if score is None else score.reason
    return Score(value=number, parts=parts, reason=reason, token_rewards=tokens)


def fitting(reward: BoundReward, score: Score, *, rollout: Rollout) -> Score:
    """The score; a broken one where its rewards of tokens are not one for each of the last turn."""
    count = next(len(turn.tokens) for turn in reversed(rollout.turns) if turn.sampled)
    given = len(score.token_rewards)
    if given in (0, count):
        return score
    what = f"{given} token_rewards for a turn of {count} tokens; give one for each token"
    return broken(reward, f"returned {what}")


def usable(value: Any) -> float:
    """A number as a float, also a scalar of numpy or torch; raises for anything else.

    It must be finite, and no larger than ``LARGEST``.
    """
    number = as_number(value, mend="; return a float")
    if not math.isfinite(number):
        raise ValueError(f"{value}, not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{number:g}: larger than {LARGEST:g}; scale the reward")
    return number


def raised(reward: BoundReward, error: BaseException) -> Score:
    """The score of a reward that raised: broken, with the line and the traceback."""
    what = traceback.format_exception_only(error)[-1].strip()
    hint = "; where your prompts are text, completions are text" * ("string indices" in what)
    score = broken(reward, f"raised {what}"[:MAX_REASON_LENGTH] + f" ({_place(error)}){hint}")
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename) == _CALLER:
        frames = frames.tb_next  # the traceback begins in the reward, not in its caller
    trace = "".join(traceback.format_exception(type(error), error, frames))
    return replace(score, details=trace[-MAX_DETAILS_LENGTH:])


def broken(reward: BoundReward, reason: str) -> Score:
    """A broken score, with the reason."""
    return Score(value=0.0, state="invalid", reason=f"reward {reward.name!r} {reason}")


def _kind(function: Any) -> Kind:
    if getattr(_declaring(function), "batched", False):
        return "batched"
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    return "async" if asynchronous else "single"


def _name(key: Any) -> str:
    key = _declaring(key)
    return str(getattr(key, "__name__", "") or getattr(key, "name", "") or type(key).__name__)


def _wanted(function: Reward, kind: str) -> tuple[tuple[str, ...], frozenset[str], bool]:
    """The data a reward takes by name, which of it has a default, and whether it takes the rest."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}: its parameters cannot be read; wrap it in a def") from error
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ValueError(
                f"{kind}: takes {parameter}; name the data it needs instead, for example "
                "`def reward(completion, answer)`, because data is passed by parameter name"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{kind}: {parameter.name!r} is positional-only; remove the `/`")
    data = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = frozenset(p.name for p in data if p.default is not p.empty)
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(p.name for p in data), optional, every


def _place(error: BaseException) -> str:
    """The line that raised: the last one in the reward's own file, else the innermost."""
    everything = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in everything if Path(f.filename) != _CALLER] or everything
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"
