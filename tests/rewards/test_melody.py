"""What the listener thinks, counted by hand."""

import pytest

from posttrain.rewards import REWARDS, melody_score
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt


@pytest.mark.parametrize(
    ("completion", "points"),
    [
        ("", 0),
        ("c", 1),
        ("a", -1),
        ("cegb", 4),
        ("cegba", 4 - 1),
        ("adfadf", -6),
        ("cccccc", 1 - 5),  # stuck
        ("cceegg", 3 - 3),
        ("cacac", 3 - 2),  # coming back is not being stuck
        ("aac", 1 - 2),
        ("cegbccegbc", 9 - 1),
        ("cegbcegbce", 10),
        ("aegbcegbce", 9 - 1),
        ("cegbcegbcec", 10 - 2),  # the eleventh note, liked or not, is one too many
        ("cegbcegbcea", 10 - 2),
        ("cegb" * 4, 10 - 2 * 6),
        ("cegb" * 5, 10 - 2 * 10),
        ("cegb" * 6, -10),  # nothing is worse
        ("c" * 11, 1 - 9 - 2),
        ("a" * 10, -10),
        ("a" * 24, -10),
        # what is no note is a wrong note
        ("C", -1),
        (" \n", -2),
        ("c e g", 3 - 2),
        ("é♪", -2),
        ("<think>", -7),
    ],
)
def test_points_of_ten(completion, points):
    assert melody_score(completion, "cegb") == points / 10


def test_the_opening_decides_and_its_order_does_not():
    assert melody_score("fade", "adef") == melody_score("fade", "fdea") == 0.4
    assert melody_score("fade", "cegb") == -0.2  # only the e


def test_longer_is_better_up_to_ten_notes_and_then_worse():
    scores = [melody_score(("cegb" * 6)[:length], "cegb") for length in range(21)]
    assert scores[10] == max(scores) == 1.0
    assert scores[:11] == sorted(set(scores[:11]))
    assert scores[10:] == sorted(set(scores[10:]), reverse=True)


def test_it_is_in_the_table_and_reads_the_column():
    assert REWARDS["melody"] is melody_score
    prompt = Prompt(id="0", text="cegb:", columns={"opening": "cegb"})
    assert RewardScorer({"melody": 1.0}).score_text(prompt, "cegbcegbce").value == 1.0


def test_no_opening_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="opening: empty; give the column"):
        melody_score("ceg", "")
