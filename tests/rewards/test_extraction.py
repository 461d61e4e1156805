"""Where the answer stands in a completion: tables written by hand."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards.extraction import EXTRACTORS, extract_answer


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("whole", "  42\n", "42"),
        ("whole", " \n", None),
        ("tag", "<answer>42</answer>", "42"),
        ("tag", "<think><answer>1</answer></think><answer> 2 </answer>", "2"),  # the last one
        ("tag", "<answer>1</answer> and <answer>2", "1"),  # the last complete one
        ("tag", "<answer>1<answer>2</answer>", "2"),
        ("tag", "</answer>5<answer>", None),
        ("tag", "</answer>", None),
        ("tag", "<answer></answer>", None),
        ("tag", "<ANSWER>5</ANSWER>", None),
        ("tag", "42", None),
        ("hashes", "2+2=4\n#### 4", "4"),
        ("hashes", "#### 3\nno, wait\n####4\nthat is it", "4"),
        ("hashes", "##### 4", "4"),
        ("hashes", "#### **42**", "42"),
        ("hashes", "### 4", None),
        ("hashes", "####", None),
        ("hashes", "####\n42\nthat is it", "42"),  # on the next line
        ("hashes", "#### 5,", "5"),
        ("hashes", "#### 42 ✅", "42"),
        ("hashes", "#### 90°", "90°"),
        ("hashes", "#### **Answer:** 42", "42"),
        ("tag", "<answer>The answer is 18.</answer>", "18."),
        ("tag", "<answer>The answer is not 18</answer>", "not 18"),
        ("boxed", r"\boxed{\text{The answer is }18}", "18"),
        ("boxed", r"\boxed{\text{Answer: 18}}", r"\text{18}"),
        ("boxed", r"\boxed{\text{answers}}", r"\text{answers}"),
        ("whole", "the answer is 5", "the answer is 5"),  # no mark
        ("boxed", r"so \boxed{42}.", "42"),
        ("boxed", r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{4", None),
        ("boxed", r"so $\boxed 42$.", "42"),
        ("boxed", r"it is \boxed7.", "7"),
        ("boxed", r"\boxed {42}", "42"),
        ("boxed", r"\fbox{42}", "42"),
        ("boxed", r"\boxed{\boxed{42}}", "42"),
        ("boxed", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # of LaTeX's braces alone
        ("boxed", r"\boxed{}", None),
        ("boxed", "boxed{4}", None),
        ("auto", r"#### 3 and \boxed{4}", "4"),  # the mark that comes last
        ("auto", "<answer>3</answer>\n#### 4", "4"),
        ("auto", "it is <answer>", "it is <answer>"),  # no complete mark: the whole text
        ("auto", " 42 ", "42"),
        ("auto", "I think the answer is **Paris**. It is large.", "Paris"),
        ("auto", "Answer: Paris", "Paris"),
        ("auto", "The answer is", "The answer is"),
        ("auto", "", None),
        ("last_number", "first 3, then 4.", "4"),
        ("last_number", "it is $1,234.50!", "$1,234.50"),
        ("last_number", "10-4", "4"),  # a difference, not the number -4
        ("last_number", "(3)-4", "4"),
        ("last_number", "x = -4", "-4"),
        ("last_number", "x = −4", "-4"),  # the typographic minus
        ("last_number", "x = − 4", "-4"),
        ("expression", "- (25 * 4) - 3 = 97", "(25 * 4) - 3"),  # a list's dash is no minus
        ("expression", "Let us see:\n  – 25*4 = 100", "25*4"),
        ("expression", "2) 25*4=100", "25*4"),
        ("expression", "Step (2) 25*4=100", "25*4"),
        ("expression", "- 1) 2) 25*4", "25*4"),
        ("expression", "-5 + 8 = 3", "-5 + 8"),
        ("expression", "<answer>- 5 + 8</answer>", "- 5 + 8"),
        ("expression", "it is - (25 * 4) + 103", "- (25 * 4) + 103"),
        ("expression", "5-2) 25*4", "5-2) 25*4"),  # no list, and no arithmetic
        ("last_number", "a half is 1/2", "1/2"),
        ("last_number", "1,2,3", "3"),
        ("last_number", "12,3456", "3456"),
        ("last_number", "1e3", "1e3"),
        ("last_number", "none", None),
        ("last_number", "٣", None),  # digits of other scripts are not read
    ],
)
def test_table(how, text, expected):
    assert extract_answer(text, how) == expected


@given(st.sampled_from(sorted(EXTRACTORS)), st.text(alphabet="</answer>#\\boxed{}019,.-$ \n"))
def test_any_text_gives_stripped_text_or_none(how, text):
    answer = extract_answer(text, how)
    assert answer is None or (answer and answer == answer.strip())


@pytest.mark.parametrize("how", sorted(EXTRACTORS))
@pytest.mark.parametrize(
    "piece",
    [
        "<answer>",
        "</answer>",
        "####",
        "\\boxed{",
        "{",
        "1,000",
        "9",
        "1e",
        "1/",
        "1)",
        "-",
        " ",
        ".1",
        "$+",
    ],
)
def test_time_is_linear(how, piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    extract_answer(text, how)
    assert time.process_time() - started < 60  # of this process; quadratic would take many minutes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"<think>maybe \boxed{18}</think> I give up", None),
        (r"<think>maybe \boxed{18}</think> so \boxed{19}", "19"),
        (r"maybe \boxed{18}</think>\boxed{19}", "19"),  # the prompt ended with <think>
        (r"<think>\boxed{17}</think><think>\boxed{18}</think>\boxed{19}", "19"),
        (r"<think>maybe \boxed{18}", None),  # cut off
        (r"\boxed{18} <think>or is it", None),
        (r"<think></think>", None),
    ],
)
def test_what_stands_in_a_reasoning_block_is_no_answer(text, said):
    marks = {"boxed": text, "tag": text.replace(r"\boxed{", "<answer>").replace("}", "</answer>")}
    for how, marked in marks.items():
        assert extract_answer(marked, how) == said
    assert extract_answer(text, "last_number") == said
