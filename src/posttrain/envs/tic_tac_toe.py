"""Tic-tac-toe: the policy is X, the environment is O, at random or without a mistake."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.protocols import Answer
from posttrain.types import Prompt, Score, Turn

EMPTY = "." * 9
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
_NUMBER = re.compile(r"\d+", re.ASCII)


def free_squares(board: str) -> list[int]:
    """The indices of the empty squares.

    >>> free_squares("XO.X.O.OX")
    [2, 4, 6]
    """
    return [square for square, mark in enumerate(board) if mark == "."]


def put(board: str, square: int, *, mark: str) -> str:
    """The board with a mark on a square."""
    return board[:square] + mark + board[square + 1 :]


@functools.cache
def has_won(board: str, mark: str) -> bool:
    """Whether a mark stands three times in a line.

    >>> has_won("XXXOO....", "X"), has_won("XXXOO....", "O")
    (True, False)
    """
    return any(all(board[int(square)] == mark for square in line) for line in LINES)


def outcome(board: str) -> str:
    """How the game has ended for X: "win", "draw" or "loss"; "" where it goes on.

    >>> outcome("XXXOO...."), outcome("XX.OO....")
    ('win', '')
    """
    if has_won(board, "X") or has_won(board, "O"):
        return "win" if has_won(board, "X") else "loss"
    return "" if "." in board else "draw"


@functools.cache
def value(board: str, mark: str) -> int:
    """What the side to move reaches when neither makes a mistake (minimax): 0 is a draw.

    A win is positive, a loss negative, by one more than the squares that are then still empty: it
    is better to win sooner and to lose later.

    >>> value(EMPTY, "X"), value("XX.OO....", "X"), value("XX.OO.X..", "O")
    (0, 5, 4)
    """
    other = "O" if mark == "X" else "X"
    squares = free_squares(board)
    if has_won(board, other):
        return -1 - len(squares)
    return max((-value(put(board, s, mark=mark), other) for s in squares), default=0)


def best_moves(board: str, mark: str) -> list[int]:
    """The moves after which the side to move still reaches what it can.

    >>> best_moves("XX.OO....", "X"), best_moves("XX.O.....", "O")
    ([2], [2])
    """
    other, most = "O" if mark == "X" else "X", value(board, mark)
    squares = free_squares(board)
    return [s for s in squares if -value(put(board, s, mark=mark), other) == most]


NOTATIONS = {
    "grid": {".": "123456789", "X": "X" * 9, "O": "O" * 9},
    "letters": {".": "123456789", "X": "ABCDEFGHI", "O": "JKLMNOPQR"},
}
"""What a square shows, by the mark on it."""

OPPONENTS: dict[str, Callable[[str], Sequence[int]]] = {
    "random": free_squares,
    "perfect": functools.partial(best_moves, mark="O"),
}
"""The squares among which each of them chooses, all alike."""


def shown(board: str, notation: str = "grid") -> str:
    r"""The board as text; an empty square shows the number that is its move.

    A grid has three lines. Letters have one, in which X has A to I and O has J to R: each character
    says by itself which square it is and what stands there, which a small model need not learn.

    >>> print(shown("X.O.X...."))
    X2O
    4X6
    789
    >>> shown("X.O.X....", "letters")
    'A2L4E6789'
    """
    names = NOTATIONS[notation]
    squares = [names[mark][square] for square, mark in enumerate(board)]
    if notation == "letters":
        return "".join(squares)
    return "\n".join("".join(squares[row : row + 3]) for row in (0, 3, 6))


@dataclass
class Game:
    """One game: the board, the opponent's random numbers, and how many moves were illegal."""

    board: str
    generator: random.Random
    told: bool
    notation: str
    illegal: int = 0

    @property
    def shown(self) -> str:
        """The board as the policy reads it."""
        text = shown(self.board, self.notation)
        return text if self.notation == "letters" else f"\n{text}\n"


class TicTacToe:
    """Ends with ``win``, ``draw`` or ``loss``; an illegal move is asked again, or loses the game.

    A move is the number of an empty square, 1 to 9; of what the policy says, the last number
    counts. ``illegal_moves`` is how many others are asked again in a game. The column ``board`` of
    a prompt is the position to begin from, X to move: nine of ``X``, ``O`` and ``.``. Without it
    the board is empty, and the seed decides who begins; it decides what the opponent draws, too.
    The column ``notation`` says how boards are shown (``grid``, ``letters``).

    >>> env = TicTacToe(opponent="perfect")
    >>> state = env.start(Prompt(id="0", text="?", columns={"board": "X...O...."}), seed=0)
    >>> print(env.reply(state, Turn(tokens=(), text="2")).strip())
    XXO
    4O6
    789
    >>> env.reply(state, Turn(tokens=(), text="5")).parts
    {'win': 0.0, 'draw': 0.0, 'loss': 1.0, 'illegal': 1.0}
    """

    def __init__(
        self,
        *,
        opponent: Literal["random", "perfect"] = "random",
        illegal_moves: int = 0,
        win: float = 1.0,
        draw: float = 0.5,
        loss: float = 0.0,
    ) -> None:
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent: one of {', '.join(OPPONENTS)}, not {opponent!r}")
        if illegal_moves < 0:
            raise ValueError(f"illegal_moves: must be at least 0, got {illegal_moves}")
        self._choices = OPPONENTS[opponent]
        self._illegal_moves = illegal_moves
        self._worth = {"win": win, "draw": draw, "loss": loss}

    def start(self, prompt: Prompt, *, seed: int | None = None) -> Game:
        """A new game; without a seed, the prompt's id is one."""
        generator = random.Random(prompt.id if seed is None else seed)
        board = prompt.columns.get("board")
        notation = prompt.columns.get("notation", "grid")
        if notation not in NOTATIONS:
            raise ValueError(
                f"prompt {prompt.id!r}: notation must be one of {', '.join(NOTATIONS)}, "
                f"not {notation!r}"
            )
        state = Game(board or EMPTY, generator, told=board is not None, notation=notation)
        if board is None:
            if generator.random() < 0.5:
                self._move(state)
        elif not _can_be_played(board):
            raise ValueError(
                f"prompt {prompt.id!r}: board must be nine of X, O and '.' in which nobody has won "
                f"and a square is empty, got {board!r}"
            )
        return state

    def opening(self, state: Game) -> str:
        """The board, unless it is the prompt's own, who then shows it."""
        return "" if state.told else state.shown

    def reply(self, state: Game, turn: Turn) -> Answer:
        """The board after the opponent's move; or the end."""
        numbers = _NUMBER.findall(turn.text)
        move = int(numbers[-1]) - 1 if numbers and len(numbers[-1]) == 1 else -1
        if move not in free_squares(state.board):
            state.illegal += 1
            if state.illegal > self._illegal_moves:
                return self._over(state, "loss")
            return f"\nnot an empty square\n{state.shown.lstrip()}"
        state.board = put(state.board, move, mark="X")
        if not outcome(state.board):
            self._move(state)
        ended = outcome(state.board)
        return self._over(state, ended) if ended else state.shown

    def _move(self, state: Game) -> None:
        square = state.generator.choice(self._choices(state.board))
        state.board = put(state.board, square, mark="O")

    def _over(self, state: Game, ended: str) -> Score:
        parts = {name: float(name == ended) for name in self._worth}
        return Score(value=self._worth[ended], parts={**parts, "illegal": float(state.illegal)})


def _can_be_played(board: object) -> bool:
    return (
        isinstance(board, str)
        and len(board) == len(EMPTY)
        and not set(board) - set("XO.")
        and not outcome(board)
    )
