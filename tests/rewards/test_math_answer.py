"""The reward `math`: a table of pairs that are the same or not, and what is broken, not wrong."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from posttrain.rewards.math.answer import math_answer

SAME = [  # (given, answer)
    # plain numbers
    ("42", "42"),
    ("42.0", "42"),
    ("42", 42),
    ("0.1", 0.1),
    ("1,000", "1000"),
    (r"1{,}000", "1000"),
    (r"1\,000\,000", "1000000"),
    ("10 000", "10000"),
    (r"1,\!000", "1000"),
    ("$1,234.50", "1234.5"),
    (r"\$18", "18"),
    ("−7", "-7"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"\frac12", r"\frac{1}{2}"),
    ("½", "0.5"),
    (r"-\frac{1}{3}", "-1/3"),
    (r"\frac{-1}{3}", r"-\frac{1}{3}"),
    (r"2\frac{1}{3}", r"\frac{7}{3}"),
    ("2 1/3", "7/3"),
    ("-1 1/2", "-3/2"),
    ("007", "7"),
    # percent
    ("50%", "50"),
    (r"50\%", "0.5"),
    ("0.5", "50%"),
    ("12.5 percent", "12.5%"),
    # scientific notation
    ("1.5e3", "1500"),
    (r"1.5 \times 10^{3}", "1500"),
    (r"1.6\times10^{-19}", r"1.6 \cdot 10^{-19}"),
    (r"10^{6}", "1000000"),
    ("6.02×10^23", r"6.02 \times 10^{23}"),
    # units, degrees, text
    (r"5\text{ cm}", "5"),
    (r"5 \mathrm{~cm}", r"5\text{ cm}"),
    ("5 cm", r"5\text{ cm}"),
    ("12 apples", "12"),
    (r"30^\circ", "30"),
    (r"30^{\circ}", "30°"),
    ("90 degrees", r"90^\circ"),
    (r"\text{Evelyn}", "Evelyn"),
    ("evelyn", r"\text{Evelyn}"),
    (r"\text{(B)}", "(B)"),
    ("B", r"\text{(B)}"),
    # roots, powers, constants
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{2}{\sqrt{2}}", r"\sqrt{2}"),
    (r"\sqrt2", r"\sqrt{2}"),
    ("√2", r"\sqrt{2}"),
    ("2√2", r"\sqrt{8}"),
    ("sqrt(2)", r"\sqrt{2}"),
    (r"2^{10}", "1024"),
    (r"2^{1/2}", r"\sqrt{2}"),
    (r"\sqrt[3]{8}", "2"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    ("π/2", r"\frac{\pi}{2}"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}"),
    (r"\log_2 8", "3"),
    (r"5!", "120"),
    (r"\binom{5}{2}", "10"),
    (r"2 \cdot 3", "6"),
    (r"\sin\frac{\pi}{6}", r"\frac{1}{2}"),
    (r"\infty", "∞"),
    # symbols
    ("x^2+2x+1", "(x+1)^2"),
    ("2x+3", "3+2x"),
    (r"\frac{x}{2}", "0.5x"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x = 5", "x=5"),
    ("y=2x+3", "y=3+2x"),
    (r"f(x)=x^2", "x^2"),
    (r"\pi r^2", r"r^2\pi"),
    ("3+4i", "4i+3"),
    ("6yx", "6xy"),  # no units
    # sets, tuples, intervals, matrices
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1, 2", "2, 1"),
    (r"1 \text{ or } 2", "1,2"),
    (r"\left(1,2\right)", "(1,2)"),
    (r"(\frac{1}{2}, 3)", "(0.5,3)"),
    ("(3, 1)", "(3,1)"),
    (r"[0,\infty)", r"[0, \infty)"),
    (r"\left(-\infty, 2\right) \cup (3,\infty)", r"(-\infty,2)\cup(3,\infty)"),
    (r"3\pm\sqrt{2}", r"3+\sqrt{2}, 3-\sqrt{2}"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}\frac{1}{2}\\2\end{pmatrix}", r"\begin{pmatrix}0.5\\ 2\end{pmatrix}"),
    (r"\emptyset", "∅"),
    # delimiters
    ("$42$", "42"),
    (r"$$\frac{1}{2}$$", "1/2"),
    (r"\(42\)", "42"),
    ("42.", "42"),
]

DIFFERENT = [
    ("43", "42"),
    ("4.2", "42"),
    ("420", "42"),
    ("-42", "42"),
    ("42, 43", "42"),
    ("1/3", "0.333"),
    ("0.333333", "1/3"),
    ("1.000001", "1"),
    ("50%", "5"),
    ("5%", "50%"),
    (r"1.6\times10^{-19}", r"1.7\times10^{-19}"),  # both are almost 0
    (r"1.6\times10^{-19}", "0"),
    (r"\frac{1}{3}\times10^{-19}", r"\frac{1}{4}\times10^{-19}"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"2\frac{1}{3}", r"\frac{2}{3}"),
    ("2 1/3", "1"),
    (r"\sqrt{2}", "1.414"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    (r"\sqrt{x^2}", "x"),  # |x|
    ("5 cm", "5 kg"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"5\text{ minutes}", r"5\text{ hours}"),
    ("30", r"\frac{\pi}{6}"),
    ("12_7", "12_5"),  # bases
    ("101_2", "101_{3}"),
    ("x^2+1", "(x+1)^2"),
    ("2x", "2"),
    ("x", "y"),
    ("y=5", "x=5"),
    ("x=6", "5"),
    ("x<5", "x>5"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[1,2)", "(1,2]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)\cup(4,\infty)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\text{Evelyn}", r"\text{Briana}"),
    ("C", r"\text{(B)}"),
    ("the answer is 5", "5"),
    ("5 because 2 + 3 is 5", "5"),
    ("", "5"),
    (r"\frac{1}{0}", "5"),
    (r"\frac{1}{", "5"),
    (r"\infty", r"-\infty"),
    ("Evelyn", "5"),
]


@pytest.mark.parametrize(("given", "answer"), SAME)
def test_the_same(given, answer):
    assert math_answer(given, answer, extract="whole") == 1


@pytest.mark.parametrize(("given", "answer"), DIFFERENT)
def test_not_the_same(given, answer):
    assert math_answer(given, answer, extract="whole") == 0


@pytest.mark.parametrize("answer", sorted({str(answer) for _, answer in SAME + DIFFERENT}))
def test_an_answer_is_itself(answer):
    assert math_answer(rf"so it is \boxed{{{answer}}}.", answer) == 1


@pytest.mark.parametrize(
    ("completion", "extract", "value"),
    [
        (r"so \boxed{5}.", "auto", 1),
        (r"\boxed{4} no, \boxed{5}", "auto", 1),
        (r"<think>\boxed{4}</think><answer>5</answer>", "auto", 1),  # the mark that comes last
        (r"<answer>\boxed{5}</answer>", "auto", 1),
        ("#### 4\n<answer>5</answer>", "auto", 1),
        ("<answer>4</answer>\n#### 5", "auto", 1),
        ("<answer>5</answer> and then <answer>", "auto", 1),
        ("5", "auto", 1),
        ("2 and 3, so the answer is 5.", "auto", 1),  # no mark: what is said to be the answer
        ("**Answer:** $5$\nThat is all.", "auto", 1),
        ("The answer is:\n\n\\[ \\frac{10}{2} \\]", "auto", 1),
        ("The answer is 4. No, the answer is 5!", "auto", 1),
        ("The answer is not 5.", "auto", 0),
        ("The answer is 5 or 6.", "auto", 0),
        (r"The answer is 5, in a box \boxed{4}", "auto", 0),  # a mark counts before words
        ("it is 5", "auto", 0),  # neither: the whole text
        ("the answer is 5", "last_number", 1),
        ("#### 5", "hashes", 1),
        ("#### 5", "boxed", 0),
        ("<answer>5</answer>", "tag", 1),
    ],
)
def test_where_the_answer_stands(completion, extract, value):
    assert math_answer(completion, "5", extract=extract) == value


@pytest.mark.parametrize(
    ("given", "answer", "tolerance", "value"),
    [
        ("0.333", "1/3", 0.001, 1),
        ("0.33", "1/3", 0.001, 0),
        ("1.414", r"\sqrt{2}", 0.001, 1),
        ("1.41", r"\sqrt{2}", 0.001, 0),
        ("(0.333, 1)", r"(\frac{1}{3}, 1)", 0.001, 1),
        (r"\{0.333, 0.667\}", r"\{\frac{2}{3}, \frac{1}{3}\}", 0.001, 1),
    ],
)
def test_tolerance(given, answer, tolerance, value):
    assert math_answer(given, answer, tolerance=tolerance) == value


@pytest.mark.parametrize("answer", ["", " ", None, True, float("nan"), r"\frac{1}{"])
def test_a_right_answer_that_cannot_be_read_is_a_fault_of_the_data(answer):
    with pytest.raises(ValueError, match="answer: cannot be read as mathematics"):
        math_answer("5", answer)


def test_tolerance_is_checked():
    with pytest.raises(ValueError, match="tolerance"):
        math_answer("5", "5", tolerance=-1.0)


@pytest.mark.parametrize(
    "answer", ["9^{9^{9}}", r"\int_0^t e^{-s} ds", r"\sum_{n=0}^\infty x^n", "see the text above 5"]
)
def test_an_answer_that_is_not_understood_is_compared_as_text(answer):
    assert math_answer(rf"\boxed{{ {answer} }}", answer) == 1
    assert math_answer("5", answer) == 0


def test_it_runs_in_threads():
    """Where no signal arrives, and where no precision may be another thread's."""
    pairs = [(r"\cot 1", r"\frac{1}{\tan 1}"), (r"\binom{x}{y}", r"\frac{x!}{y!(x-y)!}")] * 40
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda pair: math_answer(*pair), pairs)) == {1.0}
