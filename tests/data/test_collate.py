"""Rollouts and demonstrations as tensors, by hand."""

import dataclasses

import pytest
import torch

from posttrain.data.collate import collate, collate_demonstrations
from posttrain.types import Prompt, Rollout, Score, Turn

END = 1


def rollout(
    prompt: tuple[int, ...],
    completion: tuple[int, ...],
    *,
    score: Score | None = Score(value=0.0),  # noqa: B008 - it is frozen
    group: int = 0,
    cut: bool = False,
    version: int = 0,
) -> Rollout:
    return Rollout(
        prompt=Prompt(id="", text="", tokens=prompt),
        turns=(
            Turn(
                tokens=completion,
                logprobs=tuple(-0.5 * (place + 1) for place in range(len(completion))),
                text="",
                stop_reason="length" if cut else "stop",
                version=version,
            ),
        ),
        group=group,
        score=score,
    )


def test_every_field_by_hand() -> None:
    """Ragged prompts and completions, right-padded with the end token itself."""
    batch = collate(
        [
            rollout((5, 6), (7, 8, END), score=Score(value=0.5), group=3, version=2),
            rollout((9,), (END,), score=Score(value=0.0, state="timeout"), group=4, cut=True),
            rollout((5, 6, 7), (), score=Score(value=-1.0), group=4, version=1),
        ],
        pad_token=END,
    )
    assert batch.tokens.tolist() == [
        [5, 6, 7, 8, END],
        [9, END, END, END, END],
        [5, 6, 7, END, END],
    ]
    t, f = True, False
    assert batch.mask.tolist() == [[f, f, t, t, t], [f, t, f, f, f], [f, f, f, f, f]]
    assert batch.attention.tolist() == [[t, t, t, t, t], [t, t, f, f, f], [t, t, t, f, f]]
    assert batch.sampler_logprobs.tolist() == [
        [0.0, 0.0, -0.5, -1.0, -1.5],
        [0.0, -0.5, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert batch.rewards.tolist() == [0.5, 0.0, -1.0]
    assert batch.valid.tolist() == [t, f, t]
    assert batch.groups.tolist() == [3, 4, 4]
    assert batch.truncated.tolist() == [f, t, f]
    assert batch.versions.tolist() == [2, 0, 1]
    assert batch.rewards.dtype == torch.float64  # a group's baseline is a difference of rewards


def test_the_mask_comes_from_who_wrote_a_token() -> None:
    """The same tokens split elsewhere between prompt and completion have another mask."""
    whole = (END, 5, END, 5, END)
    for length in range(6):
        batch = collate([rollout(whole[:length], whole[length:])], pad_token=END)
        assert batch.tokens.tolist() == [list(whole)]
        assert batch.mask.tolist() == [[place >= length for place in range(5)]]


def test_the_pad_token_changes_only_the_padding() -> None:
    """No other field, and no real token, depends on what fills the rows."""
    rows = [rollout((5,), (6, 7, END)), rollout((8, 9), ())]
    one, other = collate(rows, pad_token=END), collate(rows, pad_token=99)
    for field in dataclasses.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if field.name == "tokens":
            assert first[one.attention].tolist() == second[one.attention].tolist()
            assert set(second[~one.attention].tolist()) == {99}
        elif first is not None:
            assert torch.equal(first, second), field.name


def test_a_batch_of_empty_completions_has_no_active_token() -> None:
    batch = collate([rollout((5, 6), ()), rollout((7,), ())], pad_token=0)
    assert batch.tokens.tolist() == [[5, 6], [7, 0]]
    assert not bool(batch.active.any())


def test_the_greedy_scores_stand_beside_the_rewards() -> None:
    """NaN where the grader broke: a missing baseline is never 0. Without any there is no field."""
    plain = rollout((5, 6), (7, END))
    scores = [Score(value=0.25), Score(value=9.0, state="crashed"), Score(value=0.0)]
    rows = [dataclasses.replace(plain, greedy=rollout((5, 6), (END,), score=s)) for s in scores]
    greedy = collate(rows, pad_token=END).greedy_rewards
    assert greedy is not None
    assert greedy.dtype == torch.float64
    assert greedy.isnan().tolist() == [False, True, False]
    assert greedy.nan_to_num(7.0).tolist() == [0.25, 7.0, 0.0]
    assert collate([plain, plain], pad_token=END).greedy_rewards is None
    unscored = dataclasses.replace(plain, greedy=rollout((5, 6), (END,), score=None))
    for odd in ([rows[0], plain], [rows[0], unscored]):
        with pytest.raises(ValueError, match="some have no scored greedy completion"):
            collate(odd, pad_token=END)


def test_unscored_rollouts_are_refused() -> None:
    """Nothing stands in for a score that is not there."""
    rows = [rollout((5,), (6,)), rollout((5,), (6,), score=None)]
    with pytest.raises(ValueError, match="score them before collate"):
        collate(rows, pad_token=0)
    with pytest.raises(ValueError, match="at least one"):
        collate([], pad_token=0)


def test_demonstrations_by_hand() -> None:
    """Each row brings its own mask, holes and all."""
    batch = collate_demonstrations(
        [((5, 6, 7, END), (False, True, False, True)), ((8, END), (False, True))], pad_token=END
    )
    assert batch.tokens.tolist() == [[5, 6, 7, END], [8, END, END, END]]
    assert batch.mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.attention.sum(dim=1).tolist() == [4, 2]
    assert batch.rewards is None
    with pytest.raises(ValueError, match="at least one"):
        collate_demonstrations([], pad_token=0)


def test_what_an_environment_wrote_is_read_and_never_learned() -> None:
    """Prompt (5, 6), the policy's (7, 8), a reply (9, 9), the policy's (END): masks with a hole."""
    first = Turn(tokens=(7, 8), text="", logprobs=(-0.5, -1.0), version=3)
    reply = Turn(tokens=(9, 9), text="")
    last = Turn(tokens=(END,), text="", logprobs=(-2.0,), stop_reason="length", version=4)
    several = dataclasses.replace(rollout((5, 6), (7,)), turns=(first, reply, last))
    batch = collate([several, rollout((5,), (7, END), version=5)], pad_token=0)
    t, f = True, False
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 9, END], [5, 7, END, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[f, f, t, t, f, f, t], [f, t, t, f, f, f, f]]
    assert batch.sampler_logprobs.tolist() == [
        [0.0, 0.0, -0.5, -1.0, 0.0, 0.0, -2.0],
        [0.0, -0.5, -1.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert batch.versions.tolist() == [3, 5]  # the oldest
    assert batch.truncated.tolist() == [True, False]


def test_turns_and_what_they_earned_by_hand() -> None:
    """−0.25 for the first turn, by tokens and by the rest; 1 and 0.5 for tokens of the last one."""
    first = Turn(tokens=(7, 8), text="", logprobs=(-0.5, -1.0))
    no = Turn(tokens=(9,), text="", reward=-0.25, token_rewards=(0.5, 0.0))
    last = Turn(tokens=(4, END), text="", logprobs=(-2.0, -1.0))
    score = Score(value=2.0, token_rewards=(1.0, 0.5))
    several = dataclasses.replace(rollout((5,), (7,), score=score), turns=(first, no, last))
    assert several.earned == (-0.25, 2.25)
    broken = dataclasses.replace(several, score=Score(value=0.0, state="crashed"))
    batch = collate([several, rollout((5,), (7, END)), broken], pad_token=0)
    assert batch.turns is not None
    assert batch.turns.tolist() == [
        [-1, 0, 0, -1, 1, 1],
        [-1, 0, 0, -1, -1, -1],
        [-1, 0, 0, -1, 1, 1],
    ]
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [[0, 0.5, -0.75, 0, 1.0, 0.5], [0.0] * 6, [0.0] * 6]
    assert batch.turn_rewards.dtype == torch.float64
    plain = collate([rollout((5,), (7, END)), rollout((5,), (7,))], pad_token=0)
    assert plain.turns is plain.turn_rewards is None
    silent = dataclasses.replace(several, turns=(first, Turn(tokens=(9,), text=""), last))
    silent = dataclasses.replace(silent, score=Score(value=2.0))
    batch = collate([silent], pad_token=0)
    assert batch.turns is not None
    assert batch.turn_rewards is None
    wrong = dataclasses.replace(several, score=Score(value=2.0, token_rewards=(1.0,)))
    with pytest.raises(ValueError, match="token_rewards: 1 for a turn of 2 tokens"):
        collate([wrong], pad_token=0)
