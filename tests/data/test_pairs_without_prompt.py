"""Pairs of whole texts: the prompt is what both begin with, cut where TRL cuts but in no word."""

import pytest

from posttrain.data.preference_sets import read_preferences

# What TRL 1.16's extract_prompt makes of them too: the longest common beginning, less one space.
AS_TRL = [
    ("The sky is", " blue.", " green."),
    ("2+3=", "5", "6"),
    ("Q: 2+3?\nA:", "5", "6"),
    ("Q: 2+3?\n\n", "five", "six"),
    ("Two spaces: ", " 5", " 6"),
    ("2+3=", "5", "5, I think"),
    ("x_", "a", "b"),
    ('He said "', 'yes"', 'no"'),
    ("f(x)=(", "x+1)", "-x)"),
    ("天空是什么颜色？", "蓝色", "绿色"),
    ("天空是", "蓝色的", "绿色的"),  # no place in it that is between words
]
# Where TRL would cut through a word or a number, or leave nothing of a completion.
IN_NO_WORD = [
    ("The sky is", " blue.", " bluish."),
    ("2+3=", "15", "16"),
    ("It costs", " 3.50", " 3.75"),
    ("It costs", " 1,920", " 1,990"),
    ("He", " can't go", " can go"),
    ("Hesaidthat:", "isn't", "isn"),
    ("le", " cafe\u0301", " cafe"),
    ("The sky is", " blue", " blue and wide"),
    ("天空是什么颜色？", "天空是蓝色的", "天空是绿色的"),
    ("하늘은", " 파란색", " 파랑"),
]


def by_trl(chosen: str, rejected: str) -> str:
    """Its rule: what both begin with, without a space at the end; of each a character is left."""
    shorter = min(len(chosen), len(rejected)) - 1
    end = next((n for n in range(shorter) if chosen[n] != rejected[n]), shorter)
    common = chosen[:end]
    return common[:-1] if common.endswith(" ") else common


@pytest.mark.parametrize(("prompt", "chosen", "rejected"), [*AS_TRL, *IN_NO_WORD])
def test_the_prompt_is_what_both_begin_with(prompt: str, chosen: str, rejected: str) -> None:
    (found,) = read_preferences([{"chosen": prompt + chosen, "rejected": prompt + rejected}])
    assert (found.prompt, *found.completions) == (prompt, chosen, rejected)
    known = (prompt, chosen, rejected) in AS_TRL
    assert (by_trl(prompt + chosen, prompt + rejected) == prompt) is known
    turned = read_preferences([{"chosen": prompt + rejected, "rejected": prompt + chosen}])[0]
    assert (turned.prompt, *turned.completions) == (prompt, rejected, chosen)


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("Yes", "No"), ("Yes", "Yep"), (" a", " b"), ("15", "16")]
)
def test_texts_without_a_common_beginning_are_refused(chosen: str, rejected: str) -> None:
    with pytest.raises(ValueError, match=r"data\[0\]: no column 'prompt'.*add it"):
        read_preferences([{"chosen": chosen, "rejected": rejected}])
