"""The games by their rules: what is legal, who wins, what the seed decides, what text may say."""

import functools
import itertools
import random
from typing import Any

import pytest

from posttrain.envs import GuessNumber, TicTacToe
from posttrain.envs.tic_tac_toe import (
    EMPTY,
    OPPONENTS,
    best_moves,
    free_squares,
    has_won,
    outcome,
    put,
    shown,
    value,
)
from posttrain.types import Observation, Prompt, Score, Turn

PLAIN = Prompt(id="0", text="?")


def said(text: str) -> Turn:
    return Turn(tokens=(), text=text)


def asked(low: int, high: int, secret: int) -> Prompt:
    return Prompt(id="0", text="?", columns={"low": low, "high": high, "secret": secret})


# Guess a number.


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 7), (3, 18), (1, 100)])
def test_halving_finds_every_number_in_time(low: int, high: int) -> None:
    """By the environment's answers alone; and one guess less is too few for some number."""
    env, needed = GuessNumber(), []
    for secret in range(low, high + 1):
        state, bottom, top = env.start(asked(low, high, secret)), low, high
        while True:
            guess = (bottom + top) // 2
            answer = env.reply(state, said(str(guess)))
            if isinstance(answer, Score):
                break
            bottom, top = (guess + 1, top) if answer == "\nhigher\n" else (bottom, guess - 1)
        assert answer.value == 1.0
        assert answer.parts["found"] == 1.0
        needed.append(int(answer.parts["guesses"]))
    assert max(needed) == (high - low + 1).bit_length()


def test_guesses_run_out() -> None:
    env = GuessNumber(max_guesses=2)
    state = env.start(asked(1, 9, 5))
    assert env.reply(state, said("9")) == "\nlower\n"
    last = env.reply(state, said("1"))
    assert isinstance(last, Score)
    assert (last.value, dict(last.parts)) == (0.0, {"found": 0.0, "guesses": 2.0})


@pytest.mark.parametrize("text", ["", "no idea", "½", "٣", "9" * 5000])
def test_text_without_a_number_is_asked_again_and_was_a_guess(text: str) -> None:
    env = GuessNumber(max_guesses=2)
    state = env.start(asked(1, 9, 3))
    assert env.reply(state, said(text)) == "\na number from 1 to 9\n"
    assert env.reply(state, said(text)) == Score(value=0.0, parts={"found": 0.0, "guesses": 2.0})


def test_the_last_number_counts() -> None:
    env = GuessNumber()
    assert env.reply(env.start(asked(1, 9, 3)), said("Not 4, so I say 3.")).value == 1.0


def test_wrong_guesses_cost_as_many_as_there_were() -> None:
    env = GuessNumber(cost=0.125, max_guesses=3)
    for guesses, total in ((["3"], 1.0), (["9", "3"], 0.875), (["9", "8", "7"], -0.375)):
        state = env.start(asked(1, 9, 3))
        *before, last = (env.reply(state, said(guess)) for guess in guesses)
        assert all(isinstance(answer, Observation) for answer in before)
        assert sum(answer.reward for answer in before) + last.value == total


def test_a_number_that_no_prompt_names_is_the_seeds() -> None:
    env = GuessNumber(low=5, high=30)
    drawn = [env.start(PLAIN, seed=seed).secret for seed in range(200)]
    assert drawn == [env.start(PLAIN, seed=seed).secret for seed in range(200)]
    assert set(drawn) == set(range(5, 31))
    assert env.start(PLAIN).secret == env.start(PLAIN).secret


@pytest.mark.parametrize(
    ("options", "message"), [({"low": 3, "high": 2}, "low"), ({"max_guesses": 0}, "max_guesses")]
)
def test_options_of_the_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuessNumber(**options)
    with pytest.raises(ValueError, match="secret 9 is not from 1 to 5"):
        GuessNumber().start(asked(1, 5, 9))


# Tic-tac-toe.


def after(board: str, mark: str) -> list[str]:
    return [put(board, square, mark=mark) for square in free_squares(board)]


def test_the_rules_know_every_game() -> None:
    """255,168 games, of which the first player wins 131,184 and the second 77,904."""

    @functools.cache
    def games(board: str, mark: str) -> tuple[int, int, int]:
        ended = outcome(board)
        if ended:
            return (int(ended == "win"), int(ended == "draw"), int(ended == "loss"))
        other = "O" if mark == "X" else "X"
        win, draw, loss = zip(
            *(games(following, other) for following in after(board, mark)), strict=True
        )
        return sum(win), sum(draw), sum(loss)

    assert games(EMPTY, "X") == (131_184, 46_080, 77_904)


@pytest.mark.parametrize("begins", ["X", "O"])
def test_the_perfect_opponent_never_loses(begins: str) -> None:
    """Against every move of X, whichever of its best moves it draws."""
    seen: set[str] = set()
    ends: set[str] = set()

    def play(board: str, mark: str) -> None:
        if board in seen:
            return
        seen.add(board)
        if outcome(board):
            ends.add(outcome(board))
            return
        if mark == "X":
            for following in after(board, "X"):
                play(following, "O")
        else:
            for square in OPPONENTS["perfect"](board):
                play(put(board, square, mark="O"), "X")

    play(EMPTY, begins)
    assert ends == {"draw", "loss"}


def test_minimax_wins_at_once_and_blocks_even_when_lost() -> None:
    assert best_moves("XX.OO....", "O") == [5]
    assert best_moves("XX.O.....", "O") == [2]  # lost, and the last to say so
    assert value("XX.O.....", "O") < 0


def moves_of_x(board: str, turn: int) -> str:
    return str(free_squares(board)[turn % len(free_squares(board))] + 1)


@pytest.mark.parametrize("opponent", list(OPPONENTS))
@pytest.mark.parametrize("seed", range(20))
def test_the_environment_moves_once_and_legally(opponent: str, seed: int) -> None:
    env: Any = TicTacToe(opponent=opponent)
    state = env.start(PLAIN, seed=seed)
    assert state.board.count("X") == 0
    assert state.board.count("O") <= 1
    for turn in itertools.count():
        before = state.board
        answer = env.reply(state, said(moves_of_x(before, turn)))
        changed = [(old, new) for old, new in zip(before, state.board, strict=True) if old != new]
        assert sorted(changed) in ([(".", "X")], [(".", "O"), (".", "X")])
        if isinstance(answer, Score):
            break
        assert len(changed) == 2
        shown = "".join(answer.split())
        assert "".join("." if mark.isdigit() else mark for mark in shown) == state.board
        assert [int(mark) - 1 for mark in shown if mark.isdigit()] == free_squares(state.board)
    ended = outcome(state.board)
    assert answer == Score(
        value={"win": 1.0, "draw": 0.5, "loss": 0.0}[ended],
        parts={**dict.fromkeys(("win", "draw", "loss"), 0.0), ended: 1.0, "illegal": 0.0},
    )


def test_who_begins_and_what_the_opponent_draws_is_the_seeds() -> None:
    env = TicTacToe()
    boards = [env.start(PLAIN, seed=seed).board for seed in range(200)]
    assert boards == [env.start(PLAIN, seed=seed).board for seed in range(200)]
    assert set(boards) == {EMPTY, *after(EMPTY, "O")}
    assert 60 < boards.count(EMPTY) < 140
    position = Prompt(id="0", text="?", columns={"board": EMPTY})
    answers = []
    for seed in (*range(30), *range(30)):
        state = env.start(position, seed=seed)
        answers.append(env.reply(state, said("5")))
    assert answers[:30] == answers[30:]
    assert len(set(answers[:30])) == 8
    assert env.start(PLAIN).board == env.start(PLAIN).board


def test_the_board_is_told_where_the_prompt_does_not_show_it() -> None:
    env = TicTacToe()
    state = next(s for s in (env.start(PLAIN, seed=n) for n in range(9)) if s.board == EMPTY)
    assert env.opening(state) == "\n123\n456\n789\n"
    assert env.opening(env.start(Prompt(id="0", text="?", columns={"board": EMPTY}))) == ""


def test_in_letters_a_character_says_its_square_and_what_stands_there() -> None:
    marks = "XO.X.O.OX"
    written = shown(marks, "letters")
    assert [("ABCDEFGHI".find(c), "JKLMNOPQR".find(c)) for c in written if not c.isdigit()] == [
        (0, -1), (-1, 1), (3, -1), (-1, 5), (-1, 7), (8, -1)
    ]  # fmt: skip
    assert [int(c) - 1 for c in written if c.isdigit()] == free_squares(marks)
    env = TicTacToe(opponent="perfect", illegal_moves=1)
    state = env.start(
        Prompt(id="0", text="?", columns={"board": "X...O....", "notation": "letters"})
    )
    assert env.reply(state, said("2")) == "ABL4N6789"
    assert env.reply(state, said("2")) == "\nnot an empty square\nABL4N6789"
    with pytest.raises(ValueError, match="notation must be one of grid, letters"):
        env.start(Prompt(id="0", text="?", columns={"notation": "words"}))


@pytest.mark.parametrize("text", ["", "0", "1", "10", "99", "-", "no", "５", "9" * 5000])
def test_an_illegal_move_loses_or_is_asked_again(text: str) -> None:
    taken = Prompt(id="0", text="?", columns={"board": "XO......."})
    lost = Score(value=-1.0, parts={"win": 0.0, "draw": 0.0, "loss": 1.0, "illegal": 1.0})
    env = TicTacToe(loss=-1.0)
    assert env.reply(env.start(taken), said(text)) == lost
    env = TicTacToe(illegal_moves=2)
    state = env.start(taken)
    for _ in range(2):
        assert env.reply(state, said(text)) == "\nnot an empty square\nXO3\n456\n789\n"
    assert state.board == "XO......."
    assert env.reply(state, said(text)).parts["illegal"] == 3.0


@pytest.mark.parametrize("board", ["XO", "XO......?", "XXX......", "OOO......", "XOXXOXOXO", 5])
def test_a_board_that_cannot_be_played_is_refused(board: object) -> None:
    with pytest.raises(ValueError, match="board must be nine of"):
        TicTacToe().start(Prompt(id="0", text="?", columns={"board": board}))


def test_options_of_the_board() -> None:
    with pytest.raises(ValueError, match="random, perfect"):
        TicTacToe(opponent="clever")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="illegal_moves"):
        TicTacToe(illegal_moves=-1)


def test_random_play_of_both_is_as_often_won_as_is_known() -> None:
    """X, who begins, wins 58.5 %, draws 12.7 % and loses 28.8 % of random games."""
    env, generator = TicTacToe(), random.Random(0)
    counts = dict.fromkeys(("win", "draw", "loss"), 0.0)
    for seed in range(2000):
        state = env.start(Prompt(id="0", text="?", columns={"board": EMPTY}), seed=seed)
        answer: Any = ""
        while isinstance(answer, str):
            answer = env.reply(state, said(str(generator.choice(free_squares(state.board)) + 1)))
        for name in counts:
            counts[name] += answer.parts[name] / 2000
    assert counts == pytest.approx({"win": 0.585, "draw": 0.127, "loss": 0.288}, abs=0.04)
    assert not has_won(EMPTY, "X")
