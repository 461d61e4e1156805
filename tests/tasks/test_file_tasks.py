"""The tasks read from files: file and gsm8k. Every fault names the file and the line."""

import json
import os
import random
import string
from pathlib import Path

import pytest

from posttrain.build.answer_check import with_check
from posttrain.rewards.numeric import numeric_answer, parse_number
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import make_task
from posttrain.tasks.gsm8k import gsm8k_task
from posttrain.tasks.prompt_file import file_task

SPLITS = ("train", "test")
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(40)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]


def write(folder, rows, *, name="rows.jsonl"):
    file = folder / name
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return file


def test_rows_become_prompts(tmp_path):
    task = file_task(path=write(tmp_path, ["", *ROWS]))
    first = task.prompts("train")[0]
    assert (first.id, first.text) == ("train-2", "0+1=")  # the id is the line
    assert first.columns == {"answer": "1", "level": 0}
    assert len(task.prompts("train")) == 40
    assert task.prompts("test") == ()
    assert (task.rewards, task.gold(first)) == ({"numeric": 1.0}, "1")


def test_what_checks_the_answers_of_a_file(tmp_path):
    """Numbers count however they are written; of other answers, the marked or the whole text."""
    task = file_task(path=write(tmp_path, ROWS))
    assert (task.rewards, task.accuracy["name"]) == ({"numeric": 1.0}, "numeric")
    texts = ("1", "0+1=1.", "The answer is 1.", r"\boxed{1}", "1 or 2", "one")
    scored = [RewardScorer(task.rewards).score_text(task.prompts("train")[0], t) for t in texts]
    assert [score.value for score in scored] == [1, 1, 1, 1, 0, 0]
    task = file_task(path=write(tmp_path, [*ROWS, {"prompt": "x+x=", "answer": "2x"}]))
    assert (task.rewards, task.accuracy) == ({"exact": 1.0}, {"name": "exact", "extract": "auto"})
    numbers = write(tmp_path, ROWS)
    unknown = write(tmp_path, [{"prompt": "9+9="}], name="test.jsonl")
    task = file_task(path=numbers, test_path=unknown)
    assert (task.rewards, task.accuracy) == ({"numeric": 1.0}, None)


def test_messages_and_other_names(tmp_path):
    file = write(tmp_path, [{"chat": CHAT, "label": 7}])
    task = file_task(path=str(file), columns={"messages": "chat", "answer": "label"})
    prompt = task.prompts("train")[0]
    assert (prompt.text, prompt.messages) == ("", tuple(CHAT))
    assert prompt.columns["answer"] == "7"  # a number becomes text
    file = write(tmp_path, [{"question": "2+3?", "prompt_id": 9}])
    task = file_task(path=file, columns={"prompt": "question"})
    assert (task.prompts("train")[0].columns["prompt_id"], task.rewards) == (9, {})
    with pytest.raises(
        ValueError, match=r"'train-1': without answers there is no gold.*task.columns"
    ):
        task.gold(task.prompts("train")[0])


def test_the_share_held_out_is_stable_when_rows_are_added(tmp_path):
    before = file_task(path=write(tmp_path, ROWS[:25]), test_share=0.3)
    after = file_task(path=write(tmp_path, [*ROWS[25:], *ROWS[:25]]), test_share=0.3)
    sides = [
        {split: {p.text for p in task.prompts(split)} for split in ("train", "test")}
        for task in (before, after)
    ]
    assert sides[0]["train"] < sides[1]["train"]
    assert sides[0]["test"] < sides[1]["test"]
    assert sides[1]["train"].isdisjoint(sides[1]["test"])
    assert len(sides[1]["test"]) == pytest.approx(12, abs=6)


def test_white_space_does_not_carry_a_prompt_over(tmp_path):
    rows = [row for n in range(40) for row in ({"prompt": f"{n} + 1"}, {"prompt": f"{n}\n+ 1 "})]
    task = file_task(path=write(tmp_path, rows), test_share=0.5)
    sides = [{" ".join(p.text.split()) for p in task.prompts(s)} for s in ("train", "test")]
    assert sides[0].isdisjoint(sides[1])
    assert len(task.prompts("train")) + len(task.prompts("test")) == 80


def test_prompts_that_differ_in_their_columns_alone_need_an_environment(tmp_path):
    """With one, an episode is a prompt and its columns, which also decide the side it is held on;
    of the rows that have a prompt of their own the prompt decides, as it does without one.
    """
    again = write(tmp_path, [ROWS[0], {**ROWS[0], "answer": "2"}], name="again.jsonl")
    with pytest.raises(ValueError, match=r":2: the prompt of .*:1 again, with other col.*task.env"):
        make_task({"name": "file", "path": again})
    assert len(make_task({"name": "file", "path": again, "env": "scripted"}).prompts("train")) == 2
    hidden = [{"prompt": "Guess.", "answer": str(n)} for n in range(40)]
    mixed = write(tmp_path, [*ROWS, *hidden], name="mixed.jsonl")
    task = file_task(path=mixed, test_share=0.3)
    plain = file_task(path=write(tmp_path, ROWS), test_share=0.3)
    sides = [{p.columns["answer"] for p in task.prompts(s) if p.text == "Guess."} for s in SPLITS]
    assert sides[0] | sides[1] == {row["answer"] for row in hidden}
    assert len(sides[1]) == pytest.approx(12, abs=6)
    for split in SPLITS:
        asked = [prompt.text for prompt in task.prompts(split) if prompt.text != "Guess."]
        assert asked == [prompt.text for prompt in plain.prompts(split)]
    other = write(tmp_path, [{"prompt": "Guess.", "answer": "50"}], name="other.jsonl")
    hidden_ones = write(tmp_path, hidden, name="hidden.jsonl")
    options = {"name": "file", "path": hidden_ones, "test_path": other}
    with pytest.raises(ValueError, match=r"the prompt of .* again, with other"):
        make_task(options)
    assert len(make_task({**options, "env": "scripted"}).prompts("test")) == 1
    with pytest.raises(ValueError, match="test prompt 'test-1' is also train prompt 'train-7'"):
        make_task({**options, "test_path": write(tmp_path, hidden[6:7]), "env": "scripted"})


def test_a_test_file_of_its_own(tmp_path):
    train = write(tmp_path, ROWS[:30])
    test = write(tmp_path, ROWS[30:], name="test.jsonl")
    task = file_task(path=train, test_path=test)
    assert [len(task.prompts(split)) for split in ("train", "test")] == [30, 10]
    test = write(tmp_path, ROWS[28:], name="test.jsonl")
    with pytest.raises(ValueError, match="test prompt 'test-1' is also train prompt 'train-29'"):
        file_task(path=train, test_path=test)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], "{oops"], r"rows\.jsonl:2: not valid JSON"),
        ([ROWS[0], {"answer": "5"}], r"rows\.jsonl:2: no column 'prompt' \(the row has 'answer'\)"),
        ([ROWS[0], {"prompt": " ", "answer": "5"}], r":2: 'prompt' is empty; fill it in or remove"),
        ([ROWS[0], {"prompt": 5, "answer": "5"}], r":2: 'prompt' must be text, got 5"),
        ([ROWS[0], {"prompt": "x"}], r":2: no answer, while other rows have one \(1 of 2 lack it"),
        ([{"prompt": "x", "answer": ""}], ":1: 'answer' is empty"),
        ([{"prompt": "x", "answer": None}], ":1: 'answer' must be text, got null"),
        ([{"prompt": "x", "answer": True}], ":1: 'answer' must be text, got true"),
        ([{"prompt": "x", "answer": ["a"]}], r":1: 'answer' must be text, got \[\"a\"\]"),
        ([{"prompt": "x", "messages": CHAT}], ":1: both 'prompt' and 'messages'"),
        ([{"messages": [*CHAT, {"role": "assistant", "content": "5"}]}], ":1: the last message is"),
        ([{"messages": [{"role": "user", "content": ""}]}], ":1: message 1: 'content' is empty"),
        ([{"prompt": "x", "completion": "5"}], ":1: the column 'completion' would hide"),
        ([], "holds no rows"),
    ],
)
def test_faults(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        file_task(path=write(tmp_path, rows))


def test_answers_are_text_and_numbers_become_text(tmp_path):
    rows = [{"prompt": str(n), "answer": a} for n, a in enumerate(["x", 5, 0.5, -3, 1e30])]
    task = file_task(path=write(tmp_path, rows))
    answers = [prompt.columns["answer"] for prompt in task.prompts("train")]
    assert answers == ["x", "5", "0.5", "-3", "1e+30"]


def test_the_column_that_is_named_is_the_answer(tmp_path):
    file = write(tmp_path, [{"prompt": "x", "label": "5", "answer": "6"}])
    task = file_task(path=file, columns={"answer": "label"})
    assert task.prompts("train")[0].columns == {"answer": "5", "label": "5"}
    assert "answer from label" in task.told


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "x"}, "columns: prompts have no 'promt'; did you mean 'prompt'"),
        (
            {"prompt": "qestion"},
            r":1: no column 'qestion', which columns.prompt names; found: 'que",
        ),
        ({"prompt": 5}, "columns.prompt: must be the name of a column, got 5"),
    ],
)
def test_faults_of_the_map(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        file_task(path=write(tmp_path, [{"question": "1+1", "answer": "2"}]), columns=columns)


def test_repeated_rows_are_kept_once_with_a_count(tmp_path):
    file = write(tmp_path, [*ROWS[:5], ROWS[0], ROWS[3], ROWS[0]])
    with pytest.warns(UserWarning, match=r"rows\.jsonl: 3 rows repeat an earlier one"):
        task = file_task(path=file)
    assert [prompt.id for prompt in task.prompts("train")] == [f"train-{n}" for n in range(1, 6)]


def test_a_whole_file_may_be_for_the_test_with_completions_as_answers(tmp_path: Path) -> None:
    """The name of a rollout's own is free again once the column has another."""
    file = tmp_path / "shown.jsonl"
    file.write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2=", "completion": "3"}')
    task = file_task(path=file, test_share=1.0, columns={"answer": "completion"})
    assert task.prompts("train") == ()
    assert [prompt.columns for prompt in task.prompts("test")] == [{"answer": "2"}, {"answer": "3"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_share": 0.5, "test_path": "x"}, "not both"),
        ({"test_share": 1.1}, "from 0 to 1"),
        ({"test_share": -0.1}, "from 0 to 1"),
        ({"test_share": 1e-9}, "leaves 40 rows of .* for training and 0 for the test"),
        ({"test_share": 1 - 1e-9}, "leaves 0 rows"),
    ],
)
def test_faults_of_the_split(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        file_task(path=write(tmp_path, ROWS), **options)


def test_no_path_and_no_file(tmp_path):
    with pytest.raises(ValueError, match="option 'path' is required"):
        make_task("file")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        make_task({"name": "jsonl", "path": str(tmp_path / "none.jsonl")})


# ------------------------------------------------------------------------------ gsm8k

PROBLEM = {"question": "Ann has 2,000 nuts and eats 80. Left?", "answer": "2,000-80\n#### 1,920"}
OTHER = {"question": "Bo has 3 nuts.", "answer": "3\n#### 3"}


def test_gsm8k_rows(tmp_path):
    write(tmp_path, [PROBLEM], name="train.jsonl")
    write(tmp_path, [OTHER], name="test.jsonl")
    task = gsm8k_task(path=tmp_path, template="Q: {question}\nA:")
    prompt = task.prompts("train")[0]
    assert prompt.text == "Q: Ann has 2,000 nuts and eats 80. Left?\nA:"
    assert prompt.columns["answer"] == "1920"
    assert task.gold(prompt) == PROBLEM["answer"]
    scorer = RewardScorer(task.rewards)
    values = {
        text: scorer.score_text(prompt, text).value
        for text in ("#### 1920", "#### 1,920.00", "####$1920", "1920", "#### 1921", "#### about")
    }
    assert list(values.values()) == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("template", "form", "gold"),
    [
        (None, "boxed", "2,000-80\n\\boxed{1,920}"),
        ("{question} Use ####.", "hashes", "2,000-80\n#### 1,920"),
        ("{question} Use <answer></answer>.", "tag", "2,000-80\n<answer>1,920</answer>"),
        ("{question}", None, PROBLEM["answer"]),
    ],
)
def test_gsm8k_counts_answers_in_any_form_and_monitors_the_form_that_is_asked_for(
    tmp_path, template, form, gold
):
    write(tmp_path, [PROBLEM], name="train.jsonl")
    write(tmp_path, [OTHER], name="test.jsonl")
    task = gsm8k_task(path=tmp_path, **({"template": template} if template else {}))
    scorer, marks = with_check(RewardScorer(task.rewards), task, accuracy=None)
    assert marks.check == "numeric"
    prompt = task.prompts("train")[0]
    assert task.gold(prompt) == gold
    plain = scorer.score_text(prompt, "She has 1,920 nuts left.")
    assert plain.value == 1
    assert plain.parts == ({"numeric": 1, "format": 0} if form else {"numeric": 1})
    if form:
        assert task.rewards["format"] == {"weight": 0.0, "extract": form}
        for text, right in ((gold, 1), (gold.replace("1,920", "1,921"), 0)):
            score = scorer.score_text(prompt, text)
            assert score.value == right
            assert score.parts == {"numeric": right, "format": 1}


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([PROBLEM], [PROBLEM], "test prompt 'test-1' is also train prompt 'train-1'"),
        (
            [{"question": "x", "answer": "5"}],
            [OTHER],
            r"train\.jsonl:1: 'answer' must end in '####",
        ),
        ([{"question": "x", "answer": "#### many"}], [OTHER], r"train\.jsonl:1: 'answer' must end"),
        ([PROBLEM], [{"answer": "#### 5"}], r"test\.jsonl:1: no column 'question'"),
    ],
)
def test_faults_of_gsm8k(tmp_path, train, test, message):
    write(tmp_path, train, name="train.jsonl")
    write(tmp_path, test, name="test.jsonl")
    with pytest.raises(ValueError, match=message):
        gsm8k_task(path=tmp_path)


def test_gsm8k_counts_and_the_template(tmp_path):
    write(tmp_path, [PROBLEM], name="train.jsonl")
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl is missing; path must be the folder"):
        gsm8k_task(path=tmp_path)
    write(tmp_path, [OTHER], name="test.jsonl")
    with pytest.raises(ValueError, match=r"num_train=2, but .* has 1 problems; ask for 1 to 1"):
        gsm8k_task(path=tmp_path, num_train=2)
    with pytest.raises(ValueError, match=r"template must contain \{question\}"):
        gsm8k_task(path=tmp_path, template="Q:")


@pytest.mark.skipif(
    "POSTTRAIN_GSM8K" not in os.environ, reason="POSTTRAIN_GSM8K does not name GSM8K's folder"
)
def test_gsm8k_itself():
    task = gsm8k_task(path=Path(os.environ["POSTTRAIN_GSM8K"]))
    assert [len(task.prompts(split)) for split in ("train", "test")] == [7473, 1319]
    scorer = RewardScorer(task.rewards)
    for split in ("train", "test"):
        prompts = list(task.prompts(split))
        assert all(scorer.score_text(p, task.gold(p)).parts["format"] == 1 for p in prompts)
        for shift in (0, 1, 100):
            for prompt, other in zip(prompts, prompts[shift:] + prompts[:shift], strict=True):
                numbers = [parse_number(p.columns["answer"]) for p in (prompt, other)]
                value = scorer.score_text(prompt, task.gold(other)).value
                assert value == float(numbers[0] == numbers[1])


@pytest.mark.skipif(
    "POSTTRAIN_GSM8K" not in os.environ, reason="POSTTRAIN_GSM8K does not name GSM8K's folder"
)
def test_the_labels_of_the_solutions_that_come_with_gsm8k_are_our_verdicts():
    """1,319 solutions of each of four models, with labels by those who published them."""
    num_judged = 0
    file = Path(os.environ["POSTTRAIN_GSM8K"]) / "example_model_solutions.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = row["ground_truth"].rpartition("A:")[2].strip()
        for made in (value for value in row.values() if isinstance(value, dict)):
            assert numeric_answer(made["solution"], answer) == float(made["is_correct"])
            num_judged += 1
    assert num_judged == 5276


@pytest.mark.skipif(
    "POSTTRAIN_GSM8K" not in os.environ, reason="POSTTRAIN_GSM8K does not name GSM8K's folder"
)
def test_what_chance_scores_on_gsm8k() -> None:
    """The figures of docs/tasks.md: random text, and always the most frequent answer."""
    prompts = gsm8k_task(path=Path(os.environ["POSTTRAIN_GSM8K"])).prompts("test")
    answers = [prompt.columns["answer"] for prompt in prompts]

    def random_share(seed: int) -> float:
        drawn = random.Random(seed)
        texts = ("".join(drawn.choices(string.printable[:95], k=256)) for _ in answers)
        return sum(map(numeric_answer, texts, answers)) / len(answers)

    shares = [random_share(seed) for seed in range(5)]
    assert sum(numeric_answer("5", answer) for answer in answers) == 40
    assert 0.010 < min(shares) < max(shares) < 0.035, shares
