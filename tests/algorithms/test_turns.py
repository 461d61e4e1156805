"""Credit for turns: by hand in float64, against plain loops, and with the environment cut out."""

import math

import pytest
import torch
from algorithms.batches import BROKEN, EMPTY, close, moved, ragged, ready, refuses
from algorithms.recipes import (
    ADVANTAGE_VARIANTS,
    OUTCOMES,
    WEIGHT_VARIANTS,
    outcome,
    prepared,
)
from torch import Tensor

from posttrain.algorithms import corrections, shaping
from posttrain.algorithms.advantages import (
    gae,
    group_normalised,
    plain_return,
    turn_group_normalised,
    turn_return_to_go,
)
from posttrain.algorithms.turns import turn_ends, turn_sum
from posttrain.types import Batch

# Three episodes of one prompt, of three, two and one turns of the policy; "." is not its own.
TURNS = torch.tensor(
    [
        [-1, 0, 0, -1, 1, -1, 2],
        [-1, 0, -1, -1, 1, 1, -1],
        [-1, 0, 0, 0, -1, -1, -1],
    ]
)
EARLY = [[0, 0, 0.5, 0, -0.25, 0, 0], [0, 1.0, 0, 0, 0, 0, 0], [0.0] * 7]


def episodes() -> Batch:
    """Rewards of turns: 0.5, −0.25, 2; 1, −1; 3."""
    return Batch.from_tensors(
        TURNS >= 0,
        turns=TURNS,
        rewards=torch.tensor([2.25, 0.0, 3.0], dtype=torch.float64),
        turn_rewards=torch.tensor(EARLY, dtype=torch.float64),
        groups=torch.tensor([4, 4, 4]),
    )


def at_turns(*rows: list[float]) -> Tensor:
    """[B, T]: numbers of turns at the tokens of those turns."""
    values = [
        [row[turn] if turn >= 0 else 0.0 for turn in turns]
        for row, turns in zip(rows, TURNS.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)


def test_what_is_left_of_the_score_is_the_last_tokens() -> None:
    made = shaping.score_at_last_token(episodes()).need("token_rewards")
    close(
        made, [[0, 0, 0.5, 0, -0.25, 0, 2], [0, 1, 0, 0, 0, -1, 0], [0, 0, 0, 3, 0, 0, 0]], rtol=0
    )
    close(
        turn_sum(made, episodes()), [[0.5, -0.25, 2.0], [1.0, -1.0, 0.0], [3.0, 0.0, 0.0]], rtol=0
    )


def test_a_penalty_on_the_episode_is_the_last_turns() -> None:
    """Shaping changes the score first; what turns have earned stays theirs."""
    batch = episodes().replace(truncated=torch.tensor([True, False, False]))
    fined = shaping.missing_end(batch, penalty=0.5)
    made = shaping.score_at_last_token(fined).need("token_rewards")
    close(turn_sum(made, batch)[0], [0.5, -0.25, 1.5], rtol=0)


def test_a_broken_episode_earns_nothing() -> None:
    early = torch.tensor(EARLY, dtype=torch.float64)
    early[1] = math.nan
    valid = torch.tensor([True, False, True])
    made = shaping.score_at_last_token(episodes().replace(turn_rewards=early, valid=valid))
    assert not made.need("token_rewards")[1].any()
    with refuses(
        "turn_rewards: nan at [1, 1] (3 in all); mark what could not be scored in `valid` instead "
        "of passing NaN or infinity on"
    ):
        shaping.score_at_last_token(episodes().replace(turn_rewards=early))


def test_return_to_go_over_turns_by_hand() -> None:
    """γ = ½: 0.5 − 0.125 + 0.5, −0.25 + 1, 2; 1 − 0.5, −1; 3."""
    batch = shaping.score_at_last_token(episodes())
    made = turn_return_to_go(batch, gamma=0.5).need("advantages")
    close(made, at_turns([0.875, 0.75, 2.0], [0.5, -1.0], [3.0]), rtol=0)
    whole = turn_return_to_go(batch).need("advantages")
    close(whole, at_turns([2.25, 1.75, 2.0], [0.0, -1.0], [3.0]), rtol=0)
    myopic = turn_return_to_go(batch, gamma=0.0).need("advantages")
    close(myopic, at_turns([0.5, -0.25, 2.0], [1.0, -1.0], [3.0]), rtol=0)


def test_turns_of_a_group_by_hand() -> None:
    """γ = ½. Turn 1: 0.875, 0.5, 3; turn 2: 0.75 and −1; turn 3 of one episode alone: 0."""
    batch = shaping.score_at_last_token(episodes())
    made = turn_group_normalised(batch, gamma=0.5, epsilon=0.25).need("advantages")
    mean = 4.375 / 3
    squares = (0.875 - mean) ** 2 + (0.5 - mean) ** 2 + (3 - mean) ** 2
    first, second = math.sqrt(squares / 2) + 0.25, math.sqrt(2 * 0.875**2) + 0.25
    expected = at_turns(
        [(0.875 - mean) / first, 0.875 / second, 0.0],
        [(0.5 - mean) / first, -0.875 / second],
        [(3 - mean) / first],
    )
    close(made, expected)
    population = turn_group_normalised(batch, gamma=0.5, epsilon=0.0, deviation="population")
    close(population.need("advantages")[:2, 4], [1.0, -1.0])
    close(population.need("advantages")[2, 1], (3 - mean) / math.sqrt(squares / 3))


def test_a_broken_episode_is_in_no_baseline_of_a_turn() -> None:
    batch = shaping.score_at_last_token(episodes().replace(valid=torch.tensor([True, True, False])))
    made = turn_group_normalised(batch, epsilon=0.0, deviation="population").need("advantages")
    close(made, at_turns([1.0, 1.0, 0.0], [-1.0, -1.0], [0.0]))


def test_equal_returns_of_a_turn_teach_nothing() -> None:
    batch = shaping.score_at_last_token(
        episodes().replace(rewards=torch.full((3,), 0.7, dtype=torch.float64), turn_rewards=None)
    )
    assert not turn_group_normalised(batch, epsilon=0.0).need("advantages").any()


def test_one_turn_is_the_whole_episode() -> None:
    for turns in (None, torch.where(ragged().mask, 0, -1)):
        batch = ragged().replace(turns=turns)
        found = turn_return_to_go(batch, gamma=0.3).need("advantages")
        close(found, plain_return(batch).need("advantages"))
        found = turn_group_normalised(batch, gamma=0.3).need("advantages")
        close(found, group_normalised(batch).need("advantages"))


@pytest.mark.parametrize("gamma", [1.0, 0.6, 0.0])
def test_turns_equal_the_loop(gamma: float) -> None:
    batch = ragged(2)
    returns: dict[tuple[int, int], float] = {}
    for row in range(12):
        own = [int(turn) for turn in batch.need("turns")[row][batch.active[row]].unique()]
        own += [0] * (row == EMPTY)
        rewards = {
            turn: sum(
                float(batch.need("token_rewards")[row, column])
                for column in range(10)
                if batch.active[row, column] and batch.need("turns")[row, column] == turn
            )
            for turn in own
        }
        for turn in own:
            later = [gamma ** (after - turn) * rewards[after] for after in own if after >= turn]
            returns[row, turn] = sum(later)
    groups = batch.need("groups").tolist()
    to_go, normalised = torch.zeros(2, 12, 10, dtype=torch.float64)
    for (row, turn), value in returns.items():
        tokens = batch.active[row] & (batch.need("turns")[row] == turn)
        others = [
            other
            for (sibling, at), other in returns.items()
            if at == turn and groups[sibling] == groups[row]
        ]
        mean = sum(others) / len(others)
        squares = sum((other - mean) ** 2 for other in others)
        to_go[row, tokens] = value
        if len(others) > 1:
            spread = math.sqrt(squares / (len(others) - 1))
            normalised[row, tokens] = (value - mean) / (spread + 1e-6)
    assert (BROKEN, 0) not in returns
    assert normalised.count_nonzero() > 25
    close(turn_return_to_go(batch, gamma=gamma).need("advantages"), to_go)
    found = turn_group_normalised(batch, gamma=gamma).need("advantages")
    close(found, normalised, rtol=1e-11)


def test_every_turn_of_a_group_is_centred() -> None:
    batch = ragged(1)
    batch = batch.replace(
        valid=batch.need("valid") & (torch.arange(12) != EMPTY)
    )  # it has no token
    made = turn_group_normalised(batch).need("advantages")
    first: dict[tuple[int, int], list[Tensor]] = {}
    for row, group in enumerate(batch.need("groups").tolist()):
        for turn in (0, 1):
            tokens = batch.active[row] & (batch.need("turns")[row] == turn)
            if tokens.any():
                first.setdefault((group, turn), []).append(made[row][tokens][0])
    sums = {key: float(sum(values)) for key, values in first.items()}
    assert len(sums) == 7
    assert max(map(abs, sums.values())) < 1e-12
    assert any(abs(float(values[0])) > 0.1 for (_, turn), values in first.items() if turn)


def test_bad_options_are_refused() -> None:
    with refuses("gamma: must be >= 0 and <= 1, got 1.5"):
        turn_return_to_go(ragged(), gamma=1.5)
    with refuses("gamma: must be >= 0 and <= 1, got -0.5"):
        turn_group_normalised(ragged(), gamma=-0.5)
    with refuses("epsilon: must be >= 0, got -1.0"):
        turn_group_normalised(ragged(), epsilon=-1.0)


def test_the_ends_of_turns() -> None:
    ends = [[2, 4, 6], [1, 5], [3]]
    assert turn_ends(episodes()).tolist() == [[c in row for c in range(7)] for row in ends]
    assert torch.equal(
        turn_ends(ragged().replace(turns=None, valid=None)),
        shaping.last(ragged().replace(valid=None)),
    )


def test_a_turn_is_overlong_by_itself() -> None:
    """Free up to 1 token, full at 3: of turns of 2, 1, 1; 1, 2; 3 tokens, ½, 0, 0; 0, ½; 1."""
    made = shaping.overlong(episodes(), limit=3, buffer=2)
    close(made.need("rewards"), [1.75, -0.5, 2.0], rtol=0)
    by_turn = turn_sum(shaping.score_at_last_token(made).need("token_rewards"), made)
    close(by_turn, [[0.0, -0.25, 2.0], [1.0, -1.5, 0.0], [2.0, 0.0, 0.0]], rtol=0)
    no_rewards = shaping.overlong(episodes().replace(turn_rewards=None), limit=3, buffer=2)
    by_turn = turn_sum(shaping.score_at_last_token(no_rewards).need("token_rewards"), made)
    close(by_turn, [[-0.5, 0.0, 2.25], [0.0, -0.5, 0.0], [2.0, 0.0, 0.0]], rtol=0)


def cut(batch: Batch) -> tuple[Batch, Tensor]:
    """The batch without what an environment wrote, and the columns that its tokens come from."""
    kept = batch.need("attention") & (batch.mask | (batch.mask.cumsum(1) == 0))
    order = (~kept).to(torch.int8).argsort(dim=1, stable=True)
    fields = {
        name: value
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and value.ndim == 2
    }
    moved = {name: value.gather(1, order) for name, value in fields.items()}
    moved["attention"] = kept.gather(1, order)
    moved["mask"] = moved["mask"] & moved["attention"]
    assert int(moved["mask"].sum()) == int(batch.mask.sum())
    assert int(moved["attention"].sum()) < int(batch.need("attention").sum())
    return batch.replace(**moved), order


@pytest.mark.parametrize("name", ADVANTAGE_VARIANTS)
def test_an_environments_tokens_change_no_advantage(name: str) -> None:
    batch = ragged()
    short, order = cut(batch)
    wanted, found = ADVANTAGE_VARIANTS[name](batch), ADVANTAGE_VARIANTS[name](short)
    close(found.need("advantages"), wanted.need("advantages").gather(1, order))
    if wanted.returns is not None:
        close(found.need("returns"), wanted.returns.gather(1, order))


def test_gae_goes_on_with_the_value_of_the_next_turn() -> None:
    """By hand, γ = ½ and λ = ½: δ = 1 + ½·4 − 2, 3 − 4; the tool's value of 99 is in neither."""
    mask = torch.tensor([[False, True, False, False, True]])
    values = torch.tensor([[9.0, 2.0, 99.0, 99.0, 4.0]], dtype=torch.float64)
    batch = Batch(
        tokens=mask.long(),
        mask=mask,
        values=values,
        turns=torch.tensor([[-1, 0, -1, -1, 1]]),
        turn_rewards=torch.tensor([[0, 1.0, 0, 0, 0]], dtype=torch.float64),
        rewards=torch.tensor([4.0], dtype=torch.float64),
    )
    made = gae(shaping.score_at_last_token(batch), gamma=0.5, lam=0.5, normalise=False)
    close(made.need("advantages"), [[0, 1 - 0.25, 0, 0, -1.0]], rtol=0)
    close(made.need("returns"), [[0, 2.75, 0, 0, 3.0]], rtol=0)


@pytest.mark.parametrize("name", WEIGHT_VARIANTS)
def test_an_environments_tokens_change_no_weight(name: str) -> None:
    short, order = cut(ragged())
    wanted = WEIGHT_VARIANTS[name](ragged()).need("weights").gather(1, order)
    close(WEIGHT_VARIANTS[name](short).need("weights"), wanted)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_environments_tokens_change_no_correction(level: corrections.Level) -> None:
    short, order = cut(ragged())
    for correct in corrections.CORRECTIONS.values():
        wanted = correct(ragged(), level=level).need("correction").gather(1, order)
        close(correct(short, level=level).need("correction"), wanted)


def test_an_environments_tokens_change_no_shaping() -> None:
    whole = ragged().replace(token_rewards=None)
    short, order = cut(whole)
    shaped = []
    for batch in (whole, short):
        made = shaping.overlong(shaping.missing_end(batch), limit=3, buffer=3)
        made = shaping.kl_in_reward(made, coefficient=0.1)
        shaped.append((made, shaping.whiten_rewards(made)))
    (wanted, whitened), (found, also) = shaped
    assert not torch.equal(wanted.need("token_rewards"), whitened.need("token_rewards"))
    valid = wanted.valid
    close(found.need("rewards")[valid], wanted.need("rewards")[valid])
    close(found.need("token_rewards"), wanted.need("token_rewards").gather(1, order))
    close(also.need("token_rewards"), whitened.need("token_rewards").gather(1, order))


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_environments_tokens_change_no_loss(name: str) -> None:
    batch = ready()
    outputs = batch.need("values") + 1.0 if name.startswith("value") else moved(batch)
    short, order = cut(batch)
    loss, gradient, metrics = outcome(name, outputs, prepared(batch))
    again = outcome(name, outputs.gather(1, order), prepared(short))
    close(again[0], loss)
    close(again[1], gradient.gather(1, order))
    for key, value in metrics.items():
        assert again[2][key] == pytest.approx(value, rel=1e-12, abs=1e-13)
