"""Which way a part goes, declared by the part: what it uses, what it goes without, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Whether something can be done; ``why_not`` is the reason in words where it cannot.

    >>> bool(Verdict()), bool(Verdict("its keys have two sizes"))
    (True, False)
    """

    why_not: str = ""

    def __bool__(self) -> bool:
        return not self.why_not


def remembered(name: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Have a test of a model made once, and its verdict kept on the model under this name.

    Copies of the model have the verdict too.
    """

    def once(test: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @functools.wraps(test)
        def verdict(model: Any, *given: Any) -> Verdict:
            if not hasattr(model, name):
                setattr(model, name, test(model, *given))
            found: Verdict = getattr(model, name)
            return found

        return verdict

    return once


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What a part goes without, why, and what that costs.

    ``chosen`` says that the recipe asks for it, so that nothing is amiss.
    """

    what: str
    why: str
    cost: str
    chosen: bool = False

    def __str__(self) -> str:
        return f"no {self.what}: {self.why}, so {self.cost}"


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a part does its work: what it ``uses``, and what it goes ``without``.

    >>> lost = Missing(what="slots", why="its keys have two sizes", cost="nothing is captured")
    >>> str(Way(uses=("batches",), without=(lost,)))
    'batches (no slots: its keys have two sizes, so nothing is captured)'
    """

    uses: tuple[str, ...]
    without: tuple[Missing, ...] = ()

    @classmethod
    def of(cls, *uses: str, wanted: Iterable[tuple[str, Verdict, str]]) -> Way:
        """What is used anyway, then what is ``wanted`` (what, whether, the cost if not) and can be.

        >>> str(Way.of("slots", wanted=[("CUDA graphs", Verdict("it syncs"), "steps are slower")]))
        'slots (no CUDA graphs: it syncs, so steps are slower)'
        """
        wanted = list(wanted)
        lost = [(what, verdict.why_not, cost) for what, verdict, cost in wanted if not verdict]
        return cls(
            uses=(*uses, *(what for what, verdict, _ in wanted if verdict)),
            without=tuple(Missing(what=what, why=why, cost=cost) for what, why, cost in lost),
        )

    def __str__(self) -> str:
        lost = "; ".join(map(str, self.without))
        return ", ".join(self.uses) + (f" ({lost})" if lost else "")

    @property
    def fell_back(self) -> tuple[Missing, ...]:
        """What is missing although nobody asked for that."""
        return tuple(missing for missing in self.without if not missing.chosen)
