"""Which metrics a person sees while a stage runs, how each is written, and the ends of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.track.printable import printable
from posttrain.types.marks import Marks, estimate_label

_BLOCKS = "▁▂▃▄▅▆▇█"


def number(values: Mapping[str, float]) -> str:
    """The sum, with three digits that mean something.

    >>> [number({"x": x}) for x in (0.0, 0.41249, 12.345, 1234.5, 0.00021, 1.5e160)]
    ['0.000', '0.412', '12.35', '1234.5', '2.1e-04', '1.5e+160']
    """
    total = sum(values.values())
    size = abs(total)
    if size != 0 and size < 0.001:
        return f"{total:.1e}"
    if size >= 1e6:
        return f"{total:.3g}"
    digits = 3 if size < 10 else 2 if size < 100 else 1
    return f"{total:.{digits}f}"


def share(values: Mapping[str, float]) -> str:
    """The sum, as a percentage.

    >>> share({"policy/clip_low": 0.01, "policy/clip_high": 0.025})
    '3.5%'
    """
    return f"{sum(values.values()):.1%}"


def count(values: Mapping[str, float]) -> str:
    """The sum, in thousands or millions.

    >>> [count({"x": x}) for x in (950, 12_345, 3_400_000)]
    ['950', '12.3k', '3.4M']
    """
    total = sum(values.values())
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(total) >= unit:
            return f"{total / unit:.1f}{letter}"
    return f"{total:.0f}"


def rate(values: Mapping[str, float]) -> str:
    """The sum, as :func:`count` has it; a small one with a digit more.

    >>> [rate({"x": x}) for x in (0.42, 9.5, 12_345)]
    ['0.4', '9.5', '12.3k']
    """
    total = sum(values.values())
    return f"{total:.1f}" if abs(total) < 10 else count(values)


def split(values: Mapping[str, float]) -> str:
    """The share of each metric in their sum.

    >>> split({"time/rollout": 3.0, "time/train": 1.0})
    'rollout 75% train 25%'
    """
    total = sum(values.values())
    if not 0 < total < math.inf:
        return "-"
    parts = ((name.rpartition("/")[2], value / total) for name, value in values.items())
    return " ".join(f"{name} {part:.0%}" for name, part in parts)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A label, the metrics behind it and how they are written.

    An ``alarm`` is shown only while it is above 0, and what has a value ``at_rest`` only while it
    is not there; what is ``wide`` gets a line of its own.
    """

    label: str
    metrics: tuple[str, ...]
    form: Callable[[Mapping[str, float]], str] = number
    alarm: bool = False
    at_rest: float | None = None
    wide: bool = False

    def text(self, latest: Mapping[str, float]) -> str | None:
        """What to show of the latest values, or None where there is nothing to say."""
        values = {name: latest[name] for name in self.metrics if name in latest}
        rest = 0.0 if self.alarm else self.at_rest
        if not values or sum(values.values()) == rest:
            return None
        return self.form(values)


_ACCURACY = Shown(label="accuracy", metrics=("eval/accuracy",), form=share)
_HELD_OUT_REWARD = Shown(label="held-out reward", metrics=("eval/reward",))

RL = (
    Shown(label="reward", metrics=("reward/mean",)),
    _ACCURACY,
    Shown(label="length", metrics=("rollout/length",)),
    Shown(label="KL to reference", metrics=("objective/kl",)),
    Shown(label="entropy", metrics=("objective/entropy",)),
    Shown(label="value explained", metrics=("value/explained_variance",), form=share),
    Shown(label="clipped", metrics=("policy/clip_low", "policy/clip_high"), form=share),
    Shown(label="no signal", metrics=("rollout/groups_without_signal",), form=share),
    Shown(
        label="groups drawn for one kept",
        metrics=("rollout/drawn_per_group",),
        form=rate,
        at_rest=1,
    ),
    Shown(label="tokens/s", metrics=("rollout/tokens_per_second",), form=rate),
    Shown(label="cut short", metrics=("rollout/truncated",), form=share, alarm=True),
    Shown(label="invalid", metrics=("reward/invalid",), form=share, alarm=True),
    Shown(label="held-out invalid", metrics=("eval/invalid",), form=share, alarm=True),
    Shown(label="workers died", metrics=("reward/workers_died",), form=count, alarm=True),
    Shown(
        label="time", metrics=("time/rollout", "time/reward", "time/train"), form=split, wide=True
    ),
)

SFT = (
    Shown(label="loss", metrics=("loss/total",)),
    Shown(label="held-out loss", metrics=("test/loss",)),
    _ACCURACY,
    Shown(label="gradient norm", metrics=("train/gradient_norm",)),
    Shown(label="learning rate", metrics=("train/learning_rate",)),
    Shown(label="tokens", metrics=("sft/tokens",), form=count),
    Shown(label="s/step", metrics=("time/train",)),
)

PREFER = (
    Shown(label="preferences", metrics=("prefer/sets",), form=count),
    Shown(label="ties", metrics=("prefer/ties",), form=count),
    Shown(label="errors on purpose", metrics=("prefer/errors",), form=count),
    Shown(label="broken scores", metrics=("prefer/broken",), form=count),
    Shown(label="workers died", metrics=("prefer/workers_died",), form=count, alarm=True),
)

REWARD = (
    Shown(label="loss", metrics=("loss/total",)),
    Shown(label="pairs right", metrics=("preference/accuracy",), form=share),
    Shown(label="margin", metrics=("preference/margin",)),
    Shown(label="gradient norm", metrics=("train/gradient_norm",)),
    Shown(label="s/step", metrics=("time/train",)),
)

DPO = (
    Shown(label="loss", metrics=("loss/total",)),
    Shown(label="held-out loss", metrics=("test/loss",)),
    Shown(label="held-out pairs right", metrics=("test/accuracy",), form=share),
    *REWARD[1:],
)

SHOWN = {"sft": SFT, "prefer": PREFER, "reward": REWARD, "dpo": DPO, "rl": RL}


def choose(
    stage: str, names: Iterable[str] | None = None, *, marks: Marks | None = None
) -> tuple[Shown, ...]:
    """What to show of a stage: its row of ``SHOWN``, or the metrics named.

    With the ``marks`` of its rewards, the accuracy says what it goes by; where nothing checks
    answers, the shares with full marks stand in its place.

    >>> [shown.label for shown in choose("rl", ["reward/mean", "reward/part/format"])]
    ['reward', 'reward/part/format']
    """
    rows = SHOWN.get(stage, (*RL, *SFT)) if names is None else (*RL, *SFT)
    if marks is not None:
        shares = _shares(marks)
        rows = tuple(row for shown in rows for row in (shares if shown is _ACCURACY else (shown,)))
    if names is None:
        return rows
    known = {shown.metrics[0]: shown for shown in rows if len(shown.metrics) == 1}
    return tuple(
        known.get(name, Shown(label=printable(name, limit=40), metrics=(name,))) for name in names
    )


def _shares(marks: Marks) -> tuple[Shown, ...]:
    shares = tuple(
        Shown(
            label=printable(estimate_label(marks.metric_name(name), marks.check), limit=60),
            metrics=(f"eval/{marks.metric_name(name)}",),
            form=share,
        )
        for name in marks.counted_rewards
    )
    return shares or (_HELD_OUT_REWARD,)


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> duration(75), duration(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The course of a metric in one line of blocks, each the mean of its share of the values.

    >>> sparkline([0.0, 0.1, 0.4, 0.8, 1.0])
    '▁▂▄▇█'
    """
    finite = [value for value in values if math.isfinite(value)]
    num_blocks = min(width, len(finite))
    edges = [index * len(finite) // num_blocks for index in range(num_blocks + 1)]
    pieces = [finite[start:stop] for start, stop in itertools.pairwise(edges)]
    means = [sum(piece) / len(piece) for piece in pieces]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


class Ends(NamedTuple):
    """Where a curve begins and where it ends: means over its first and its last ``num`` values."""

    first: float
    last: float
    num: int


def ends(values: Sequence[float]) -> Ends | None:
    """The ends of a curve over a tenth of its values, ten at most; None where there are none.

    >>> ends([0.0, 0.5, 1.0])
    Ends(first=0.0, last=1.0, num=1)
    >>> ends([float(value) for value in range(20)])
    Ends(first=0.5, last=18.5, num=2)
    """
    if not values:
        return None
    num = min(10, max(1, len(values) // 10))
    return Ends(sum(values[:num]) / num, sum(values[-num:]) / num, num)


def over_steps(num: int) -> str:
    """Over what the two ends of a curve are means.

    >>> over_steps(1), over_steps(3)
    ('first and last step', 'first and last 3 steps')
    """
    return "first and last step" if num == 1 else f"first and last {num} steps"
