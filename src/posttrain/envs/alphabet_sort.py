"""Sort names by the alphabet, over several turns in which the list grows."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from posttrain.protocols import Answer
from posttrain.types import Observation, Prompt, Score, Turn

NEW = " // new"
MAX_LINES = 200  # of an answer that are compared
FIRST = """
Ada Alan Amara Anton Beatriz Boris Carla Chen Dana Diego Elena Emil Farah Felix Grace Hana Hugo Ines
Ivan Jonas Julia Kamal Karin Lars Leila Marco Mina Nadia Noah Olga Omar Paula Priya Rosa Samir Sofia
Tariq Tomas Uma Vera Viktor Wei Yara Yusuf Zoe
""".split()  # noqa: SIM905 - a list that can be read
LAST = """
Abbott Almeida Bauer Becker Castro Cohen Dubois Dvorak Eriksen Evans Fischer Fujita Garcia Gupta
Hansen Huang Ito Ivanova Jensen Johnson Kaplan Kowalski Larsen Lopez Meyer Murphy Nakamura Novak
Okafor Olsen Patel Peters Quinn Rahman Rossi Sato Silva Tanaka Torres Ueda Varga Vogel Weber Xu
Yamada Young Zhang Zimmer
""".split()  # noqa: SIM905 - a list that can be read


@dataclass
class Sorting:
    """One episode: the names of each turn, by what they are sorted, and how well it went."""

    rounds: list[list[str]]
    by: str
    shares: list[float] = field(default_factory=list)

    def expected(self) -> list[str]:
        """The right list of this turn, with the new names marked, but in the first."""
        place = len(self.shares)
        new = set(self.rounds[place]) if place else set()
        known = [name for names in self.rounds[: place + 1] for name in names]
        mark = {name: f"{name}{NEW}" if name in new else name for name in known}
        return [mark[name] for name in sorted(known, key=self._key)]

    def _key(self, name: str) -> tuple[str, str]:
        first, _, last = name.partition(" ")
        return (first, last) if self.by == "first" else (last, first)


class AlphabetSort:
    """The mean over the turns of how alike the list is to the right one, to the power ``power``.

    In each turn the policy is given new names, and writes the whole list so far: a name in a line,
    new ones marked with ``// new`` from the second turn on. Lists are compared by the longest
    matching blocks (``difflib``); the reward of a turn is its share of the score. The column
    ``names`` of a prompt is a list of lists of names; without it they are drawn by the seed. The
    first names are told before the first turn. After the environment of the same name in
    ``verifiers``.

    >>> names = [["Uma Ito", "Ada Xu"], ["Boris Sato"]]
    >>> env = AlphabetSort(by="first")
    >>> state = env.start(Prompt(id="0", text="Sort.", columns={"names": names}))
    >>> env.reply(state, Turn(tokens=(), text="Ada Xu\\nUma Ito")).reward
    0.5
    >>> env.reply(state, Turn(tokens=(), text="Ada Xu\\nBoris Sato // new\\nUma Ito")).value
    0.5
    """

    def __init__(
        self,
        *,
        turns: int = 3,
        names_per_turn: int = 3,
        by: Literal["first", "last", "either"] = "either",
        power: float = 4.0,
        chat: bool | None = None,
    ) -> None:
        if turns < 1 or names_per_turn < 1 or turns * names_per_turn > len(FIRST):
            raise ValueError(
                f"turns, names_per_turn: must be at least 1, and at most {len(FIRST)} names in "
                f"all, got {turns} turns of {names_per_turn}"
            )
        if power <= 0:
            raise ValueError(f"power: must be above 0, got {power}")
        self._turns, self._names_per_turn = turns, names_per_turn
        self._by: str = by
        self._power = power
        self._around = "" if chat else "\n"

    def start(self, prompt: Prompt, *, seed: int | None = None) -> Sorting:
        """The names of the prompt, or those that the seed (or the prompt's id) draws."""
        draw = random.Random(prompt.id if seed is None else seed)
        number = self._turns * self._names_per_turn
        pairs = zip(draw.sample(FIRST, number), draw.sample(LAST, number), strict=True)
        names = [f"{first} {last}" for first, last in pairs]
        by = draw.choice(["first", "last"]) if self._by == "either" else self._by
        step = self._names_per_turn
        drawn = [names[begin : begin + step] for begin in range(0, number, step)]
        return Sorting(_checked(prompt, drawn), by)

    def opening(self, state: Sorting) -> str:
        """What is asked, and the first names."""
        asked = f"Sort these names by the alphabet, by {state.by} name, one in a line:"
        return f"\n\n{asked}\n{_lines(state.rounds[0])}{self._around}"

    def reply(self, state: Sorting, turn: Turn) -> Answer:
        """The next names; after the last, the end."""
        given = [line.strip() for line in turn.text.splitlines()[:MAX_LINES] if line.strip()]
        alike = difflib.SequenceMatcher(None, given, state.expected(), autojunk=False).ratio()
        share = alike**self._power / len(state.rounds)
        state.shares.append(share)
        if len(state.shares) == len(state.rounds):
            right = share == 1 / len(state.rounds)
            return Score(value=share, parts={"last_right": float(right)})
        asked = (
            f"Add these names and write the whole list again, sorted in the same way; put "
            f"'{NEW.strip()}' behind those that are new in this turn:"
        )
        text = f"{asked}\n{_lines(state.rounds[len(state.shares)])}"
        return Observation(f"{self._around}{text}{self._around}", reward=share)


def _lines(names: Sequence[str]) -> str:
    return "\n".join(names)


def _checked(prompt: Prompt, drawn: list[list[str]]) -> list[list[str]]:
    rounds = prompt.columns.get("names", drawn)
    right = isinstance(rounds, list) and rounds and all(isinstance(r, list) and r for r in rounds)
    names = [name for names in rounds for name in names] if right else []
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError(
            f"prompt {prompt.id!r}: names must be lists of names for each turn, none of them empty "
            f"and no name twice, got {rounds!r:.100}"
        )
    return [list(names) for names in rounds]
