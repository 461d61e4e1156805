"""Usual ranges: a setting that can be run but is hardly meant gets a warning before a run.

What can only be a mistake is refused by the key's own limits, or by a rule. A value outside the
range here is a caution: a line of ``posttrain check``, and one at the start of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from posttrain.config.fields import Section
from posttrain.config.resolved import Resolved


class Usual(NamedTuple):
    """The usual range of a setting, and what goes wrong outside of it."""

    low: float
    high: float
    why: str

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"{self.low:g} or more"
        return f"{self.low:g} to {self.high:g}"

    def advice(self, key: str) -> str:
        """The advice to set a key to its usual range.

        >>> Usual(0, 10, "why").advice("rl.kl.coefficient")
        'set rl.kl.coefficient from 0 to 10'
        """
        return f"set {key} {'to' if self.high == float('inf') else 'from'} {self}"


_MANY = float("inf")
_NATS = "it is never reached, or always passed at once"
USUAL: dict[str, Usual] = {
    # Keys of every section that has them.
    "learning_rate": Usual(1e-9, 0.03, "AdamW moves every weight by about so much at each step"),
    "weight_decay": Usual(0, 1, "each step takes that times the learning rate off every weight"),
    "max_gradient_norm": Usual(1e-3, _MANY, "every gradient is clipped to almost nothing"),
    "epochs": Usual(1, 1000, "what is shown so often is learned by heart"),
    "temperature": Usual(0.05, 5, "far below it is greedy, far above every token is as likely"),
    "max_skipped": Usual(1, 100, "a stage that is NaN for so long has broken down"),
    "max_invalid": Usual(0, 0.9, "the run goes on though its grader is broken"),
    # Keys of one section.
    "run.save_minutes": Usual(0, 1440, "a run that is cut short loses more than a day"),
    "grading.workers": Usual(0, 512, "each is a process of its own"),
    "grading.seconds": Usual(0.05, 3600, "graders are cut off as they begin, or hold up the run"),
    "grading.memory_mb": Usual(64, _MANY, "a worker takes as much to begin with"),
    "cluster.deadline": Usual(1, 86_400, "who is slow counts as dead, or who is dead as slow"),
    "dpo.beta": Usual(1e-3, 100, "nothing holds the policy, or nothing lets it go"),
    "prefer.samples": Usual(2, 1024, "so many completions of one prompt"),
    "rl.group_size": Usual(1, 1024, "so many completions of one prompt hold up every step"),
    "rl.max_lag": Usual(0, 64, "rollouts of so old a policy say little of this one"),
    "rl.partial": Usual(1, 16, "every part reads all that was sampled before again"),
    "rl.max_resamples": Usual(1, 1000, "a step may never end"),
    "rl.top_p": Usual(0.1, 1, "what is left is nearly greedy, and explores nothing"),
    "rl.entropy_coefficient": Usual(0, 1, "being undecided is worth more than being right"),
    "rl.missing_end_penalty": Usual(0, 100, "no other reward counts beside it"),
    "rl.kl_stop": Usual(1e-6, 100, _NATS),
    "rl.penalty_target": Usual(1e-6, 100, _NATS),
    "rl.kl.coefficient": Usual(0, 10, "nothing but staying where it is can be learned"),
    "rl.kl.target": Usual(1e-4, 1e4, _NATS),
    "rl.critic.coefficient": Usual(1e-4, 100, "the critic's loss is all that counts, or nothing"),
    "eval.samples": Usual(0, 4096, "so many completions of every problem"),
    # Options of the pieces of [rl].
    "clip_low": Usual(1e-5, 1, "at 0 no token may become less likely, whatever its reward"),
    "clip_high": Usual(1e-5, 10, "at 0 no token may become likelier, far above 1 none is held"),
    "clip": Usual(1e-3, 1e3, "a value may hardly move, or is not held at all"),
    "gamma": Usual(0.5, 1, "a reward is forgotten within a token or two"),
    # Options of [rewards].
    "weight": Usual(-1000, 1000, "the rewards beside it do not count, and gradients grow with it"),
}
"""Ranges by key, or by the last parts of a dotted key."""
_PIECES = ("advantage", "loss", "weights", "correction")


def unusual(recipe: Resolved) -> list[str]:
    """What lies outside its range in a resolved recipe; stages that are not run are left alone."""
    return [
        f"{key}: {value:g} is far from usual: {usual.why}; {usual.advice('it')}"
        for key, value, usual in far_from_usual(recipe)
    ]


def far_from_usual(recipe: Resolved) -> Iterator[tuple[str, float, Usual]]:
    """Every setting outside its range, with its value and that range."""
    for key, value in _settings(recipe):
        usual = _find(key)
        if usual is not None and not usual.low <= value <= usual.high:
            yield key, value, usual


def _find(key: str) -> Usual | None:
    parts = key.split(".")
    ends = (".".join(parts[begin:]) for begin in range(len(parts)))
    return next((USUAL[end] for end in ends if end in USUAL), None)


def _settings(recipe: Resolved) -> Iterator[tuple[str, float]]:
    """The numbers of a recipe by their dotted keys."""
    for name in type(recipe).model_fields:
        section = getattr(recipe, name, None)
        if isinstance(section, Section):
            yield from _numbers(section, name)
    for piece in _PIECES if "rl" in recipe.stages else ():
        spec = getattr(recipe.rl, piece)
        if ":" not in spec["name"]:  # an option of a user's own piece may mean something else
            yield from ((f"rl.{piece}.{n}", v) for n, v in spec.items() if _is_number(v))
    yield from ((f"rewards.{n}.weight", s["weight"]) for n, s in recipe.rewards.items())


def _numbers(section: Section, prefix: str) -> Iterator[tuple[str, float]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _numbers(value, f"{prefix}.{name}")
        elif _is_number(value):
            yield f"{prefix}.{name}", value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
