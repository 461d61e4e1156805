"""The implementation a part runs with, declared by the part: fast paths used, or why not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Support:
    """Whether something can be done; ``why_not`` is the reason in words where it cannot.

    >>> bool(Support()), bool(Support("its keys have two sizes"))
    (True, False)
    """

    why_not: str = ""

    def __bool__(self) -> bool:
        return not self.why_not


def remembered(name: str) -> Callable[[Callable[..., Support]], Callable[..., Support]]:
    """Have a test of a model made once, and its verdict kept on the model under this name.

    Copies of the model have the verdict too.
    """

    def once(test: Callable[..., Support]) -> Callable[..., Support]:
        @functools.wraps(test)
        def verdict(model: Any, *given: Any) -> Support:
            if not hasattr(model, name):
                setattr(model, name, test(model, *given))
            found: Support = getattr(model, name)
            return found

        return verdict

    return once


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A fast path that a part does not use, why, and what that costs.

    ``chosen`` says that the recipe turned it off, so that it is no fallback.
    """

    what: str
    why: str
    cost: str
    chosen: bool = False

    def __str__(self) -> str:
        return f"no {self.what}: {self.why}, so {self.cost}"


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a part is implemented here: the fast paths it ``uses``, and those it runs ``without``.

    >>> lost = Missing(what="slots", why="its keys have two sizes", cost="nothing is captured")
    >>> str(Way(uses=("batches",), without=(lost,)))
    'batches (no slots: its keys have two sizes, so nothing is captured)'
    """

    uses: tuple[str, ...]
    without: tuple[Missing, ...] = ()

    @classmethod
    def of(cls, *uses: str, wanted: Iterable[tuple[str, Support, str]]) -> Way:
        """A way with ``uses``, and what is possible of ``wanted`` (name, possible, cost if not).

        >>> str(Way.of("slots", wanted=[("CUDA graphs", Support("it syncs"), "steps are slower")]))
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
        """The fast paths that are not used although the recipe did not turn them off."""
        return tuple(missing for missing in self.without if not missing.chosen)
