"""The input of the rules: metrics of the steps so far, and facts about the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

WINDOW = 5
"""Steps that a rule averages over, so that a single noisy step does not decide."""

AGREE = "rollout/groups_without_signal"
FULL = 1 + 1e-6
"""Larger shares come from rewards that declare no maximum, so they are no measure of success."""

History = Sequence[Mapping[str, float]]


class Seen(NamedTuple):
    """What a rule saw: in words, which of its cases holds, and what to run again with.

    ``change`` are overrides of the command line (``--sft.epochs 3``); empty where a recipe alone
    cannot fix it.
    """

    text: str
    case: str = ""
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Background:
    """Facts about a run that its metrics do not contain.

    ``stage`` is the one that logs, ``stages`` those of the whole run. ``decides`` names the reward
    that decides what is right (empty where none does), ``weights`` holds every reward's weight and
    ``full`` the full marks of those that have any: rules read such a reward as a share of them.
    The critic learns alone for ``critic_warmup`` steps. ``rounding`` is how far engine and trainer
    may disagree without anything being wrong. ``num_prompts`` are the train prompts, of which a
    step takes ``prompts_per_step``; ``num_problems`` the held-out ones of an evaluation within rl,
    ``num_eval_problems`` those of the stage eval; 0 is unknown. With ``shared_prompts``
    demonstrations answer the very prompts of rl. An epoch of sft has ``steps_per_epoch``. ``keys``
    are the settings of the recipe by dotted name. With ``environment`` an environment gives the
    scores, as its part ``env``.
    """

    stage: str = "rl"
    stages: Sequence[str] = ()
    decides: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    full: Mapping[str, float] = field(default_factory=dict)
    critic_warmup: int = 0
    rounding: float = 0.05
    num_prompts: int = 0
    prompts_per_step: int = 0
    num_problems: int = 0
    num_eval_problems: int = 0
    shared_prompts: bool = False
    steps_per_epoch: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    environment: bool = False

    def judged_by(self, metrics: Mapping[str, float]) -> Background:
        """The same, of a run whose environment scores, once a step shows that it does.

        What the task's rewards say beside it is then no measure of what is learned.
        """
        if self.environment or not {"reward/part/env", "eval/part/env"} & metrics.keys():
            return self
        return replace(self, environment=True, decides="env", weights={"env": 1.0}, full={})

    @property
    def warmed_up(self) -> bool:
        """Whether the stage sft comes before."""
        return "sft" in self.stages

    @property
    def only_monitored(self) -> bool:
        """Whether the reward that decides has weight 0, so that nothing is learned from it."""
        return self.weights.get(self.decides) == 0

    @property
    def learned_from(self) -> Background:
        """The same without a check that is only monitored, which says nothing of the signal."""
        return replace(self, decides="", weights={}) if self.only_monitored else self

    def most(self, name: str) -> float:
        """What a reward is divided by: its full marks, or 1 where it has none above 0."""
        full = self.full.get(name, 1.0)
        return full if full > 0 else 1.0

    def marks(self, name: str, share: float) -> str:
        """A share of full marks as the reward gave it.

        >>> setup = Background(full={"essay": 10.0})
        >>> setup.marks("essay", 0.25), setup.marks("exact", 0.25)
        ('2.50 of 10', '0.25')
        """
        most = self.most(name)
        return f"{share:.2f}" if most == 1 else f"{share * most:.2f} of {most:g}"


Check = Callable[[History, Background], Seen | None]
"""A rule's question: what is wrong in the steps so far, or None while nothing is."""


def scaled(setup: Background, key: str, *, by: float) -> str:
    """The override that multiplies a key of the recipe; empty where the key has no number.

    >>> setup = Background(keys={"rl.learning_rate": 1e-5, "sft.epochs": 20})
    >>> scaled(setup, "rl.learning_rate", by=0.3), scaled(setup, "sft.epochs", by=0.25)
    ('--rl.learning_rate 3e-06', '--sft.epochs 5')
    """
    value = setup.keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return ""
    new = max(1, round(value * by)) if isinstance(value, int) else float(f"{value * by:.1g}")
    return "" if new == value else f"--{key} {new:g}"


def sft_scaled(setup: Background, *, by: float) -> str:
    """The override that makes sft so many times as long: by its steps, where they are given.

    >>> sft_scaled(Background(keys={"sft.epochs": 1, "sft.steps": 30}), by=2)
    '--sft.steps 60'
    """
    return scaled(setup, "sft.steps", by=by) or scaled(setup, "sft.epochs", by=by)


def in_shares(metrics: Mapping[str, float], setup: Background) -> dict[str, float]:
    """The metrics with every reward of its own as a share of its full marks.

    Where an environment scores, the accuracy by the task's own check is left out.

    >>> in_shares({"reward/part/essay": 1.0, "reward/mean": 1.0}, Background(full={"essay": 10.0}))
    {'reward/part/essay': 0.1, 'reward/mean': 1.0}
    """
    found = dict(metrics)
    if setup.environment:
        found.pop("eval/accuracy", None)
    for name in setup.full:
        for key in (f"reward/part/{name}", f"eval/part/{name}"):
            if key in found:
                found[key] /= setup.most(name)
    return found


def series(history: History, name: str) -> list[float]:
    """Every finite value of a metric, oldest first.

    >>> series([{"a": 1.0}, {"b": 9.0}, {"a": math.nan}, {"a": 2.0}], "a")
    [1.0, 2.0]
    """
    return [record[name] for record in history if math.isfinite(record.get(name, math.nan))]


def mostly(
    history: History, name: str, *, test: Callable[[float], bool], steps: int = WINDOW
) -> float | None:
    """The median of the last steps if four in five of them pass the test, else None.

    >>> mostly([{"a": 1.0}] * 4 + [{"a": 0.0}], "a", test=lambda value: value > 0.5)
    1.0
    >>> mostly([{"a": 1.0}] * 3 + [{"a": 0.0}] * 2, "a", test=lambda value: value > 0.5)
    """
    values = series(history, name)[-steps:]
    if not values or len(values) < steps or sum(map(test, values)) < 0.8 * steps:
        return None
    return statistics.median(values)


def blocks(values: Sequence[float]) -> list[list[float]]:
    """The values in blocks of ``WINDOW``, the last one whole; an odd rest at the start is left out.

    >>> blocks([9.0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    [[1, 1, 1, 1, 1], [2, 2, 2, 2, 2]]
    """
    rest = len(values) % WINDOW
    return [list(values[at : at + WINDOW]) for at in range(rest, len(values), WINDOW)]


def noise(values: Sequence[float], *, steps: int = WINDOW) -> float:
    """How far the means of ``steps`` values here and there lie apart by chance.

    Estimated from the spread inside blocks of steps, which learning does not widen.

    >>> noise([0.5] * 20), round(noise([0.0, 1.0] * 10), 2)
    (0.0, 0.31)
    """
    inside = [statistics.pvariance(block) for block in blocks(values)]
    return math.sqrt(2 * statistics.fmean(inside) / steps) if inside else math.inf


def rising(values: Sequence[float]) -> bool:
    """Whether values rise beyond chance: their correlation with time has a t-value above 4."""
    if len(values) < WINDOW or len(set(values)) == 1:
        return False
    r = statistics.correlation(range(len(values)), values)
    return r > 0 and r * r * (len(values) - 2) > 16 * (1 - r * r)


def resamples(history: History, setup: Background) -> bool:
    """Whether groups that agree are dropped and others drawn in their place.

    The training reward then covers only groups with different rewards: it stays in the middle
    whatever is learned, and only held-out problems show progress.
    """
    if setup.keys.get("rl.dynamic_sampling"):
        return True
    drawn = series(history, "rollout/resampled")
    return bool(drawn) and statistics.median(drawn) > 0


def progress(history: History, setup: Background) -> tuple[float, float] | None:
    """The reward that decides at the start and at the end; None where that is not known.

    Over train prompts, or where :func:`resamples` holds, over held-out ones.
    """
    if resamples(history, setup):
        looks = series(history, f"eval/part/{setup.decides}")
        return (looks[0], looks[-1]) if len(looks) > 1 else None
    values = series(history, f"reward/part/{setup.decides}")
    if not values:
        return None
    return statistics.fmean(values[:WINDOW]), statistics.fmean(values[-WINDOW:])


def level(history: History, setup: Background) -> float:
    """The reward that decides, or the whole reward where none does, over the last steps."""
    part = series(history, f"reward/part/{setup.decides}")
    values = (part or series(history, "reward/mean"))[-WINDOW:]
    return statistics.fmean(values) if values else 0.0


def solved(history: History, setup: Background) -> bool:
    """Whether nearly everything is right: equal rewards or low entropy are then success."""
    values = series(history, f"reward/part/{setup.decides}")[-WINDOW:]
    return bool(values) and 0.8 <= statistics.fmean(values) <= FULL


class Gap(NamedTuple):
    """A reward near full marks on train prompts, and what it is on held-out ones."""

    text: str
    name: str
    clear: bool
    """Whether the gap is larger than chance explains, given the number of prompts."""


def gap(history: History, setup: Background) -> Gap | None:
    """Train against held-out at the last evaluation, where a reward was near 1 on train prompts.

    The error of each mean is that of a share, ``sqrt(p(1−p)/n)`` after one more success and one
    more failure: the widest there is for scores between 0 and 1. Clear is a gap of 0.1, and of 2.5
    errors. Groups that were chosen because they differ are no measure of the train prompts.
    """
    names = [setup.decides] if setup.decides else [n for n, w in setup.weights.items() if w > 0]
    for name in names:
        looks = evaluations(history, setup, name=f"eval/part/{name}")
        train = _around(history, f"reward/part/{name}", at=f"eval/part/{name}")
        if not train or not looks or not 0.9 <= statistics.fmean(train) <= FULL:
            continue
        agreed = _around(history, AGREE, at=f"eval/part/{name}")
        if resamples(history, setup) and not (agreed and statistics.median(agreed) >= 0.99):
            continue
        mean, (held_out, problems) = statistics.fmean(train), looks[-1]
        error = math.hypot(
            share_error(mean, len(train) * setup.prompts_per_step), share_error(held_out, problems)
        )
        clear = mean - held_out > max(0.1, 2.5 * error)
        text = f"{name} is {setup.marks(name, mean)} on the train prompts and "
        text += f"{setup.marks(name, held_out)} on {problems} held-out ones"
        return Gap(text, name, clear)
    return None


def _around(history: History, name: str, *, at: str) -> list[float]:
    """The values of a metric in the steps before another was last measured, or else after."""
    last = max((n for n, record in enumerate(history) if series([record], at)), default=None)
    if last is None:
        return []
    return series(history[: last + 1], name)[-WINDOW:] or series(history[last:], name)[:WINDOW]


def evaluations(history: History, setup: Background, *, name: str) -> list[tuple[float, int]]:
    """What a held-out metric was at each evaluation, and over how many problems."""
    return [
        (record[name], int(record.get("eval/problems", setup.num_problems)))
        for record in history
        if math.isfinite(record.get(name, math.nan))
    ]


def evaluation_error(history: History, problems: Sequence[int]) -> float:
    """How far two held-out rewards of any scale, over so many problems each, differ by chance.

    Their scores are taken to spread as widely as those of the train prompts.
    """
    spread = statistics.median(series(history, "reward/std") or [math.inf])
    return spread * math.sqrt(sum(1 / max(1, count) for count in problems))


def share_error(share: float, count: int) -> float:
    """The error of a share of ``count``; with one more success and failure it is never 0.

    >>> round(share_error(0.5, 98), 3), round(share_error(0.0, 98), 3)
    (0.051, 0.01)
    """
    if count < 1:
        return math.inf
    known = (min(max(share, 0.0), 1.0) * count + 1) / (count + 2)
    return math.sqrt(known * (1 - known) / count)
