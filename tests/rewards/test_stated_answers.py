"""The one rule by which a number counts as a model's answer, on endings as models write them."""

import time

import pytest

from posttrain.rewards.extraction import extract_answer
from posttrain.rewards.numeric import numeric_answer

RIGHT = [
    # of Qwen2.5-Coder-0.5B-Instruct
    (r"Therefore, Solo needs to read \(\boxed{13.25}\) pages on average in one day.", "13.25"),
    ("it will take for the fog bank to cover the whole city is:\n\\[ \\boxed{140} \\]", "140"),
    ("```output\n14\n```\nThe time for the fog bank is \\(\\boxed{14}\\) minutes.", "14"),
    ("Therefore, the answer is:\n\\[\n\\boxed{165}\n\\]", "165"),
    (r"\[ \frac{60 \text{ pages}}{4 \text{ days}} = 15 \text{ pages/day} \]", "15"),
    # in a box
    (r"She makes 9 * 2 = 18 dollars.\n\n\boxed{18}", "18"),
    (r"Therefore, Janet makes $\boxed{18}$ dollars every day.", "18"),
    (r"\[ \boxed{\$18} \]", "18"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{\text{18 dollars}}", "18"),
    (r"\boxed{\textbf{18}}", "18"),
    (r"\boxed{18\%}", "18"),
    (r"\boxed{1,080}", "1080"),
    (r"\boxed{1{,}080}", "1080"),
    (r"\boxed{12,\!500}", "12500"),
    (r"\boxed{70\,000}", "70000"),
    (r"\boxed{9 \times 2 = 18}", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{18.00}", "18"),
    (r"\boxed{-5}", "-5"),
    (r"\boxed{−5}", "-5"),
    (r"\boxed{\frac{3}{4}}", "0.75"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{12 \text{ cm}^2}", "12"),
    (r"\boxed{12\,m^{2}}", "12"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{9} eggs are left, so she makes \boxed{18} dollars.", "18"),
    (r"\boxed{18}. She does so on all 7 days of the week.", "18"),  # a box before a later number
    (r"The total is \boxed{18", "18"),  # cut off in the box
    # after hashes
    ("9 * 2 = 18\n#### 18", "18"),
    ("####18", "18"),
    ("#### $18", "18"),
    ("#### \\$18.00", "18"),
    ("#### **18**", "18"),
    ("#### 18 dollars", "18"),
    ("#### 18.", "18"),
    ("#### 9 * 2 = 18", "18"),
    ("####\n18", "18"),
    ("#### Answer: 18", "18"),
    ("#### 18\n\nThis is 9 eggs at $2 each.", "18"),
    ("#### Step 1: Find the eggs\n16 - 7 = 9\n\n#### Step 2: Find the money\n9 * 2 = 18", "18"),
    ("#### 1. Eggs\n16 - 7 = 9\n#### 2. Money\n9 * 2 = $18", "18"),
    # in a tag
    ("<think>16-7</think><answer>18</answer>", "18"),
    ("<answer>The answer is 18.</answer>", "18"),
    ("<answer>$18</answer> for 9 eggs", "18"),
    # in words
    ("The answer is 18.", "18"),
    ("So the answer is $18. She sold 9 eggs for that.", "18"),
    ("The answer is: 18", "18"),
    ("The answer is **18**.", "18"),
    ("The answer is $18$.", "18"),
    (r"The answer is \(18\).", "18"),
    ("The final answer is\n\n$$18$$\n\nas 3 + 4 = 7 eggs are used.", "18"),
    ("The answer: 18", "18"),
    ("Answer: 18", "18"),
    ("ANSWER: 18", "18"),
    ("Answer: **18**", "18"),
    ("**Answer:** $18", "18"),
    ("**Answer**: 18 dollars per day.", "18"),
    ("**Final Answer:** `18`\n\nThis took 3 steps.", "18"),
    (r"\text{Answer: }18", "18"),
    ("**Answer:** $18 (9 × $2)", "18"),
    ("So 9 are left.\nAnswer: 18 dollars for 9 eggs at $2.", "18"),
    ("So 9 are left.\nAnswer: 9 x $2 = $18 for 9 eggs.", "18"),
    ("The answer is 9 x 2 = 18.", "18"),
    ("Answer = 18", "18"),
    ("The answer is 9 * 2 = 18 dollars. That is for 1 day.", "18"),
    ("The answer is 9 eggs * $2 = $18.", "18"),
    ("The answer is 18 dollars, since 9 * 2 = 18.", "18"),
    ("The answer is x = 18", "18"),
    ("The answer is -5.", "-5"),
    ("The answer is 3 1/2 hours.", "3.5"),
    ("The answer is - 5", "-5"),
    ("The answer is \u2212 5 degrees.", "-5"),
    ("The answer is $- 5$.", "-5"),
    ("The answer is - $5.", "-5"),
    ("The answer is 10 - 15 = - 5", "-5"),
    ("So x = \u2212 5", "-5"),
    ("#### - 5", "-5"),
    (r"\boxed{- 5}", "-5"),
    ("<answer>- 5</answer>", "-5"),
    ("The answer is 2^3 = 8", "8"),
    ("The answer is $2^{3} = 8$.", "8"),
    ("The answer is ${2}^3 = 8$.", "8"),
    ("The answer is 2\u00b3 = 8", "8"),
    ("The answer is 2**3 = 8", "8"),
    ("The answer is 2 \u00d7 4 = 8", "8"),
    ("The answer is 2 \u00b7 4 = 8", "8"),
    (r"The answer is 2 \times 4 = 8", "8"),
    (r"The answer is $2 \cdot 4 = 8$", "8"),
    ("The answer is 2 plus 6 = 8", "8"),
    ("The answer is 3! + 2 = 8", "8"),
    ("The answer is 5! = 120", "120"),
    ("#### 2^3 = 8", "8"),
    ("The answer is 9. No, wait: the answer is 18.", "18"),
    ("The answer is that on each of 7 days she makes 18 dollars", "18"),
    ("Answer: 16 - 3 - 4 = 9 eggs are left.\nThey make 9 * 2 = 18 dollars.", "18"),
    ("Answer:\n1. 16 - 7 = 9\n2. 9 * 2 = 18", "18"),
    ("Let us see.\n**Answer:**\n16 eggs are laid.\n16 - 7 = 9, and 9 * 2 = 18", "18"),
    ("The answer is:\n1. Eggs: 16 - 7 = 9\n2. Money: 9 * 2 = 18", "18"),
    ("The answer is \\(\\frac12\\) of it, for 9 eggs.", "1/2"),
    (r"\boxed{\dfrac34}", "0.75"),
    ("The answer is ½.", "0.5"),
    ("It takes 2¾ hours", "2.75"),
    ("It weighs ⅓ kg", "1/3"),
    ("The answer is 1 200 dollars.", "1200"),
    ("#### 1\u202f200\u202f500.50", "1200500.5"),
    (r"\boxed{7.2\times 10^1}", "72"),
    ("The answer is 7.2 × 10^{1}, of 9", "72"),
    ("The answer is 10^2.", "100"),
    ("In all 1.5e3", "1500"),
    ("The answer is $2 million.", "2000000"),
    (r"\boxed{2.5 \text{ thousand}}", "2500"),
    ("It costs 1½ billion dollars.", "1.5e9"),
    ("The answer is 1/2 or 0.5.", "0.5"),  # the same number
    ("The answer is 90 minutes or 1.5 hours.", "90"),  # of other units
    ("The answer is 18, 9 eggs at 2 dollars.", "18"),
    # the last number
    ("Janet makes $18 every day at the farmers' market.", "18"),
    ("She makes 9 * 2 = 18.", "18"),
    ("= 18", "18"),
    ("A: 18", "18"),
    ("18", "18"),
    ("The total comes to **$1,080.50**!", "1080.5"),
    (r"\[ 9 \times 2 = 18 \text{ dollars} \]", "18"),
    (r"the share is \frac{3}{4}.", "3/4"),
    (r"the change is $-\frac{1}{2}$", "-0.5"),
    ("The temperature is −5 degrees.", "-5"),
    ("it went down to –5.", "-5"),
    ("She needs 18%.", "18"),
    ("He pays €18,000.00 in all", "18000"),
    ("It takes 2 1/2 hours", "2.5"),
    ("<think>9? 10?</think>18 dollars.", "18"),
    ("Step 1: 16 - 7 = 9\nStep 2: 9 * 2 = 18", "18"),
    ("## Answer\n\n18 dollars", "18"),
    ("16 - 7 = 9 eggs, and 9 * 2 = 18, so", "18"),  # cut at the limit
]
WRONG = [
    ("4. The fourth friend pressed it 60 times.\n   - Therefore, the number of", "175"),  # cut
    ("Pieces on the board = \\frac{83}{3} = 27.33\\ldots\n\\]\nAs it must be whole, we", "27"),
    (r"\boxed{17}", "18"),
    (r"\boxed{17} and not 18", "18"),  # a box before a later number
    (r"\boxed{18} … \boxed{17}", "18"),  # the last box
    (r"\boxed{18, 20}", "18"),  # two answers are none
    (r"\boxed{18 \text{ or } 20}", "18"),
    (r"\boxed{18 \text{ or } 20}", "20"),
    (r"\boxed{16, 17, 18}", "18"),
    (r"\boxed{9 \times 2}", "2"),  # nothing computed
    (r"\boxed{\text{eighteen}} or 18", "18"),
    (r"\boxed{3:30}", "30"),
    (r"\boxed{3\frac{1}{2}}", "0.5"),
    (r"\boxed{1{,}080}", "80"),
    ("#### 17", "18"),
    ("#### 18\n#### 17", "18"),
    ("#### 17\nNumbers: 16, 17, 18", "18"),
    ("#### 9 * 2 = 18", "9"),
    ("<answer>17</answer> 18", "18"),
    ("<answer>17 or 18</answer>", "18"),
    ("The answer is 17. 18", "18"),
    ("The answer is 18. The answer is 17.", "18"),  # the last statement
    ("The answer is 17, the answer is 18, the answer is 19", "18"),
    (r"The answer is 18. \boxed{17}", "18"),
    (r"\boxed{18}. So the answer is 17.", "18"),
    ("Answer: 17 dollars", "18"),
    ("The answer is 9 * 2 = 18 dollars.", "9"),
    ("The answer is 5.", "-5"),
    ("The answer is - 5", "5"),
    ("The answer is \u2212 5", "5"),
    (r"\boxed{- 5}", "5"),
    ("So x = \u2212 5", "5"),
    ("The answer is:\n- 5 apples\n- 6 pears", "-6"),  # a list
    ("The answer is 10 % 3 = 1", "10"),
    ("The answer is 5! = 120", "5"),
    ("The answer is 3 1/2.", "0.5"),
    ("The answer is 1,080.", "80"),
    ("18 eggs, which make 36 dollars", "18"),
    ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19", "18"),  # a list of guesses
    ("18, or 17", "18"),
    *(
        (hedged, answer)
        for answer in ("70", "71", "72", "73")
        for hedged in (
            "The answer is 72 or 73",
            "The answer is 72 dollars or 73 dollars.",
            "Answers: 70, 71, 72",
            "It is either 71 or 72.",
            "The answer is either 71 or 72",
            "#### 72 or maybe **73**",
            "The answers are 71 and 72.",
            "The answer is x = 71 or x = 72",
            "Answer: 70, 71, or 72",
        )
    ),
    *(
        (parts, answer)
        for answer in ("5", "30")
        for parts in (
            "The answer is 5 hours 30 minutes.",
            "It takes 5 hours and 30 minutes",
            "#### 5h 30m",
            "The answer is 5 dollars and 30 cents",
        )
    ),
    ("The answer is 2 million", "2"),
    (r"\boxed{7.2\times 10^1}", "7.2"),
    ("The answer is 10^2.", "10"),
    ("The answer is 1 200.", "200"),
    ("The answer is 1 200.", "1"),
    ("They meet at 3:30", "30"),
    ("The ratio is 3:2", "2"),
    ("10-5", "-5"),
    ("It takes 2 1/2 hours", "0.5"),
    ("<think>The answer is 18.</think> I do not know.", "18"),
    ("<think>The answer is 18.", "18"),  # cut while it thinks
    ("I do not know.", "18"),
    ("eighteen", "18"),
    ("", "18"),
]


def test_the_table_is_large_and_of_both_verdicts():
    assert len(RIGHT) >= 80
    assert len(WRONG) >= 40


@pytest.mark.parametrize(("ending", "answer"), RIGHT)
def test_what_is_right(ending, answer):
    assert numeric_answer(ending, answer) == 1, extract_answer(ending, "answer")


@pytest.mark.parametrize(("ending", "answer"), WRONG)
def test_what_is_wrong(ending, answer):
    assert numeric_answer(ending, answer) == 0, extract_answer(ending, "answer")


@pytest.mark.parametrize(("ending", "answer"), RIGHT)
def test_a_right_ending_is_wrong_for_every_number_beside_it(ending, answer):
    for other in ("17", "19", "1", "2", "7", "9", "16", "0", "3", "4"):
        if numeric_answer(answer, other) == 0:
            assert numeric_answer(ending, other) == 0


@pytest.mark.parametrize(("ending", "answer"), [row for row in RIGHT if "<think>" not in row[0]])
def test_reasoning_before_the_answer_changes_nothing(ending, answer):
    thought = r"the answer is 5, or \boxed{6}, or #### 7"
    assert numeric_answer(f"<think>{thought}</think>{ending}", answer) == 1


@pytest.mark.parametrize(
    "piece",
    [
        *("answer is 9 -", "answer is ", "#### 1. a", "answer: 1 2 ", "1:", "1 1/", "= ", "= - "),
        *(r"\frac{1}", "answer is - ", "answer is 2^", "answer is 2)", "- "),
        *("1 or ", "1 200 ", "1, ", "10^", "5 hours "),
    ],
)
def test_time_is_linear(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    extract_answer(text, "answer")
    assert time.process_time() - started < 60  # of this process; quadratic would take many minutes
