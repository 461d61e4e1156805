"""The melody task: openings, the best continuation, and demonstrations of all qualities."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from posttrain.rewards import melody_score
from posttrain.tasks import demonstrations
from posttrain.tasks.melody import NOTES, melody, melody_task


def test_openings_are_four_different_notes_and_gold_repeats_them():
    task = melody_task()
    for prompt in (*task.prompts("train"), *task.prompts("test")):
        opening = prompt.columns["opening"]
        assert prompt.text == f"{opening}:"
        assert len(set(opening)) == len(opening) == 4
        assert set(opening) <= set(NOTES)
        assert task.gold(prompt) == (opening * 3)[:10]


def test_there_are_840_openings():
    with pytest.raises(ValueError, match="there are 675 problems for training and 165 for"):
        melody_task(num_train=10**4)


def test_a_melody_is_three_to_eight_notes_and_never_stuck():
    generator = random.Random(0)
    melodies = [melody("cegb", generator) for _ in range(4000)]
    counts = Counter(map(len, melodies))
    assert sorted(counts) == [3, 4, 5, 6, 7, 8]
    assert counts[5] > 1.5 * counts[8]  # as 4 : 2
    assert set("".join(melodies)) == set(NOTES)
    assert all(x != y for notes in melodies for x, y in pairwise(notes))


def test_demonstrations_are_of_all_qualities_and_the_longer_the_better():
    task = melody_task()
    rows = demonstrations(task, num=6000)
    scores = [melody_score(row["completion"], row["prompt"][:-1]) for row in rows]
    assert min(scores) < -0.3
    assert max(scores) == 0.8
    assert sum(scores) / len(scores) == pytest.approx(0.165, abs=0.02)

    def mean_of(length):
        chosen = [s for s, r in zip(scores, rows, strict=True) if len(r["completion"]) == length]
        return sum(chosen) / len(chosen)

    assert mean_of(3) < mean_of(5) < mean_of(7)
    assert mean_of(4) < mean_of(6) < mean_of(8)
    test = {prompt.text for prompt in task.prompts("test")}
    assert test.isdisjoint(row["prompt"] for row in rows)
