"""Tic-tac-toe from many positions: the policy is X, and has the move."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Literal

from posttrain.envs.tic_tac_toe import (
    EMPTY,
    NOTATIONS,
    Game,
    TicTacToe,
    best_moves,
    free_squares,
    outcome,
    put,
    shown,
)
from posttrain.tasks.demonstrations import played
from posttrain.tasks.splits import held_out, sample_splits, shuffled
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

_TURNED = (6, 3, 0, 7, 4, 1, 8, 5, 2)  # the square that comes to each when the board is turned
_MIRRORED = (2, 1, 0, 5, 4, 3, 8, 7, 6)


def tic_tac_toe_task(
    *,
    max_moves: int = 4,
    test_max_moves: int | None = None,
    test_games: int = 1,
    notation: Literal["grid", "letters"] = "grid",
    template: str = "{board}\n",
    num_train: int = 800,
    num_test: int = 150,
    seed: int = 0,
) -> PromptTask:
    """Positions after at most ``max_moves`` legal moves, of which either side made the first.

    It is played with the environment of the same name. A position and what becomes of it by turns
    and mirrors stand in the same split: no game of the test begins where one of the training began,
    though both may come to the same position. Without the environment the task is one move, and
    the gold answer is a best one. Demonstrations, for a policy that chats, are games of two who
    choose among the empty squares at random.

    Positions of the test may be earlier ones, of at most ``test_max_moves``, and each may begin
    ``test_games`` games: ``num_test`` counts positions. Boards are shown as ``notation`` says.
    """
    test_max_moves = max_moves if test_max_moves is None else test_max_moves
    if not 0 <= test_max_moves <= max_moves <= 8 or test_games < 1:
        raise ValueError(
            "task 'tic_tac_toe': max_moves must be from 0 to 8, test_max_moves no more than that, "
            f"and test_games at least 1, got {max_moves}, {test_max_moves}, {test_games}"
        )
    if notation not in NOTATIONS:
        raise ValueError(
            f"task 'tic_tac_toe': notation must be one of {', '.join(NOTATIONS)}, not {notation!r}"
        )
    if "{board}" not in template:
        raise ValueError(f"task 'tic_tac_toe': template lacks {{board}}: {template!r}")
    boards = positions(max_moves)
    order = shuffled(len(boards), seed=seed, num_needed=num_train + num_test)
    early = len(EMPTY) - test_max_moves  # so many squares are empty, or more
    train, test = sample_splits(
        (b for b in map(boards.__getitem__, order) if b.count(".") >= early or not _is_test(b)),
        identity=_identity,
        num_train=num_train,
        num_test=num_test,
        kind="task 'tic_tac_toe'",
        fix="raise max_moves",
    )

    def prompts(split: str, chosen: list[str]) -> tuple[Prompt, ...]:
        return tuple(
            Prompt(
                id=f"{split}-{number}",
                text=template.replace("{board}", shown(board, notation)),
                columns={
                    "board": board,
                    "notation": notation,
                    "answers": _names(best_moves(board, "X")),
                },
            )
            for number, board in enumerate(chosen)
        )

    return PromptTask(
        name="tic_tac_toe",
        rewards={"one_of": 1.0},
        train=prompts("train", train),
        test=prompts("test", test * test_games),
        solve=lambda prompt: prompt.columns["answers"][0],
        demonstrate=_random_game,
        accuracy="one_of",
    )


@functools.cache
def positions(max_moves: int) -> tuple[str, ...]:
    """All positions after that many moves or fewer with X to move and nobody's victory, sorted.

    >>> [len(positions(moves)) for moves in (0, 1, 2, 3, 4)]
    [1, 10, 82, 334, 1090]
    """
    found: set[str] = set()
    for moves in range(max_moves + 1):
        boards = {EMPTY}
        for mark in itertools.islice("XO" * 5, moves % 2, moves % 2 + moves):
            boards = {
                put(board, square, mark=mark)
                for board in boards
                if not outcome(board)
                for square in free_squares(board)
            }
        found |= {board for board in boards if not outcome(board)}
    return tuple(sorted(found))


def symmetric(board: str) -> set[str]:
    """The board, turned and mirrored in every way.

    >>> sorted(symmetric("X........"))
    ['........X', '......X..', '..X......', 'X........']
    """
    found = set()
    for _ in range(4):
        board = "".join(board[square] for square in _TURNED)
        found |= {board, "".join(board[square] for square in _MIRRORED)}
    return found


def _identity(board: str) -> str:
    return f"tic_tac_toe {min(symmetric(board))}"


def _is_test(board: str) -> bool:
    return held_out(_identity(board))


def _names(squares: list[int]) -> list[str]:
    return [str(square + 1) for square in squares]


def _random_game(prompt: Prompt, generator: random.Random) -> list[dict[str, str]]:
    def move(state: Game) -> str:
        return generator.choice(_names(free_squares(state.board)))

    return played(TicTacToe(), prompt, player=move, seed=generator.getrandbits(32))
