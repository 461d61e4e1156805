"""Prompts given in Python: a list of texts and rows, under the checks that a file's rows get."""

import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from small_runs import RL, recipe

import posttrain
from posttrain.build.rows import data_name, rows_task
from posttrain.build.setup import Supplied
from posttrain.check import check_recipe
from posttrain.data.conventions import Form, read_as
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import make_task
from posttrain.types import Prompt

SUM = {"prompt": "1+1=", "answer": "2"}
USER = {"role": "user", "content": "2+3?"}
ASSISTANT = {"role": "assistant", "content": "5"}
COLUMNS = {"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]}


class Frame:
    """As a DataFrame of pandas: it yields the names of its columns, and is not true or false."""

    columns = tuple(COLUMNS)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a DataFrame is ambiguous")


def _pandas(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


@pytest.mark.parametrize("made", [pyarrow.Table.from_pylist, _pandas])
def test_a_null_of_a_table_is_that_of_a_file(
    tmp_path: Path, made: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """Every row of a table has every column: a null is a cell that is not there."""
    chats = [
        {"messages": [USER], "prompt": None, "answer": "5", "note": 1.5},
        {"messages": None, "prompt": "1+1=", "answer": None, "note": None},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(chats), path)
    wanted = _read("prompts", path)
    assert wanted == [
        {"messages": [USER], "answer": "5", "note": 1.5},
        {"prompt": "1+1=", "note": None},
    ]
    assert _read("prompts", made(chats)) == wanted
    assert _read("prompts", data_name(made(chats))) == wanted
    task = rows_task(None, prompts=made(chats[:1]), test_prompts=made([SUM]))
    assert [p.columns for p in task.prompts("train")] == [{"answer": "5", "note": 1.5}]
    pairs = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
        {"prompt": "a", "chosen": "d", "rejected": "e", "margin": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(pairs), path)
    assert _read("preferences", data_name(made(pairs))) == _read("preferences", path)


def _read(form: Form, source: Any) -> list[dict[str, Any]]:
    return [row for _, _, row in read_as(form, source)]


def shortness(completion: str) -> float:
    return 1 - len(completion) / 10


def read(prompts: Any) -> None:
    made = rows_task(None, prompts=prompts, test_prompts=())
    if isinstance(made, dict):
        make_task(made)


def fault(prompts: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the callers compare the message
        read(prompts)
    return str(raised.value)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (COLUMNS, "dict"),
        (Frame(), "Frame"),
        (5, "int"),
        (Prompt(id="a", text="1+1="), "Prompt"),
    ],
)
def test_a_table_by_column_is_no_list_of_rows(tmp_path: Path, table: Any, kind: str) -> None:
    """It would yield the names of its columns, and the run would train on those words."""
    expected = rf'prompts: expected a list of rows, got {kind}; of a DataFrame: df\.to_dict\("rec'
    with pytest.raises(ValueError, match=f"^{expected}"):
        posttrain.rl(prompts=table, reward=shortness, folder=tmp_path / "r", **RL)
    with pytest.raises(ValueError, match=f"^test_{expected}"):
        rows_task(None, prompts=["1+1="], test_prompts=table)
    with pytest.raises(ValueError, match=f"^{expected}"):
        posttrain.evaluate("tiny", prompts=table, reward=shortness)


@pytest.mark.parametrize(
    "row",
    [
        {**SUM, "answer": "3"},  # the prompt of the first row with another answer
        {"prompt": "x"},
        {"prompt": "", "answer": "5"},
        {"prompt": 1, "answer": "5"},
        {"text": "x", "answer": "5"},
        {"prompt": "x", "answer": ""},
        {"prompt": "x", "answer": None},
        {"prompt": "x", "answer": True},
        {"prompt": "x", "messages": [USER]},
        {"messages": "hi"},
        {"messages": []},
        {"messages": [USER, ASSISTANT]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "me", "content": "x"}]},
        {**SUM, "prompt": "x", "completion": "5"},
        {**SUM, "prompt": "x", "num_tokens": 5},
    ],
)
def test_faults_of_a_row_are_those_of_a_file(tmp_path: Path, row: dict[str, Any]) -> None:
    """The same words, with the place in the list for the line of the file."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(SUM)}\n{json.dumps(row)}\n")
    in_file = fault(file)
    assert in_file.startswith(f"{file}:2: ")
    expected = in_file.replace(f"{file}:2", "prompts[1]").replace(f"{file}:1", "prompts[0]")
    assert fault([SUM, row]) == expected


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (1, "int"),
        (None, "NoneType"),
        (("1=", "2"), "tuple"),
        (["1=", "2"], "list"),
        (Prompt(id="a", text="1="), "Prompt"),
    ],
)
def test_rows_are_texts_and_dicts_alone(row: Any, kind: str) -> None:
    """Anything else is refused by its place."""
    expected = f'prompts[1]: expected text or a dict like {{"prompt": …}}, got {kind}'
    assert fault(["0=", row]) == expected


@pytest.mark.parametrize(
    ("column", "value"),
    [("answer", float("nan")), ("answer", Fraction(1, 2)), ("prompt", b"1="), ("messages", {1})],
)
def test_values_that_no_file_could_hold(column: str, value: Any) -> None:
    """The gap of a DataFrame is NaN: it is no answer."""
    message = fault([{**SUM, column: value}])
    assert message.startswith(f"prompts[0]: {column!r} is nothing that JSON can hold: {value!r}; ")


def test_rows_become_prompts() -> None:
    """An answer that is a number becomes text; other columns stay the objects that they are."""
    marks = {1, 2}
    rows = (
        {"prompt": "1+1=", "answer": 2, "marks": marks},
        MappingProxyType({"prompt": "1+2=", "answer": np.int64(3)}),
        {"messages": (USER,), "answer": 0.5},
    )
    task = rows_task(None, prompts=iter(rows), test_prompts=[{**SUM, "prompt": "x"}])
    train = task.prompts("train")
    assert [prompt.id for prompt in train] == ["train-0", "train-1", "train-2"]
    assert [prompt.columns["answer"] for prompt in train] == ["2", "3", "0.5"]
    assert train[0].columns["marks"] is marks
    assert (train[2].text, train[2].messages) == ("", (USER,))
    assert task.rewards == {"numeric": 1.0}
    assert [task.gold(prompt) for prompt in task.prompts("test")] == ["2"]


def test_a_table_of_pyarrow_is_its_rows() -> None:
    """A null is a cell that is not there."""
    table = pyarrow.table({**COLUMNS, "messages": pyarrow.nulls(2)})
    task = rows_task(None, prompts=table, test_prompts=())
    assert [(p.text, p.columns) for p in task.prompts("train")] == [
        ("1+1=", {"answer": "2"}),
        ("1+2=", {"answer": "3"}),
    ]


def test_a_row_that_comes_twice_is_dropped_with_a_warning() -> None:
    """As from a file; the others keep their places as ids."""
    with pytest.warns(UserWarning, match="^prompts: 1 row repeats an earlier one and is dropped"):
        task = rows_task(None, prompts=["a", "a", "b"], test_prompts=())
    assert [prompt.id for prompt in task.prompts("train")] == ["train-0", "train-2"]


def test_the_place_of_a_test_prompt() -> None:
    """By the name that the caller knows: those of ``evaluate`` are its prompts."""
    with pytest.raises(ValueError, match=r"^test_prompts\[1\]: expected text"):
        rows_task(None, prompts=["a"], test_prompts=["b", 1])
    with pytest.raises(ValueError, match=r"^prompts\[1\]: expected text"):
        posttrain.evaluate("tiny", prompts=["b", 1], reward=shortness)


def test_without_answers_there_is_no_gold(tmp_path: Path) -> None:
    """The check does not try "" and ask to fix the answers: this reward asks for none."""
    given = recipe(tmp_path / "r", task=None, rewards=None, sft=None, eval=None)
    supplied = Supplied(
        task=rows_task(None, prompts=[f"{n}+1=" for n in range(8)], test_prompts=()),
        rewards=RewardScorer({shortness: 1.0}),
    )
    report = check_recipe(given, fast=True, supplied=supplied)
    (line,) = [line for line in report.lines if line.name == "gold answers"]
    assert (line.state, "no reward reads the answer" in line.text) == ("pass", True)


OTHERS = [{"text": f"{n}+1=", "result": n + 1} for n in range(4)]
MAP = {"prompt": "text", "answer": "result"}


def test_columns_with_other_names_are_mapped_as_the_error_says(tmp_path: Path) -> None:
    """In rows and in files, for training, test and ``evaluate``: by the map that it writes."""
    hint = re.escape("columns={'prompt': 'text'}")
    with pytest.raises(ValueError, match=hint):
        posttrain.rl(prompts=OTHERS, reward="exact", folder=tmp_path / "a")
    run = posttrain.rl(
        prompts=OTHERS[:2], test_prompts=OTHERS[2:], columns=MAP, folder=tmp_path / "a", **RL
    )
    assert {row["prompt"] for row in run.samples(1)} <= {"0+1=", "1+1="}
    found = posttrain.evaluate(run, prompts=OTHERS[2:], columns=MAP)
    assert len(found.greedy) == 2
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OTHERS))
    table = rows_task(None, prompts=tmp_path / "p.jsonl", test_prompts=(), columns=MAP)
    assert table == {"name": "file", "path": str(tmp_path / "p.jsonl"), "columns": MAP}
    prompts = make_task(table).prompts("train")
    assert [prompt.columns["answer"] for prompt in prompts] == ["1", "2", "3", "4"]
    named = rows_task(None, prompts=None, test_prompts=tmp_path / "p.jsonl", columns=MAP)
    assert [prompt.text for prompt in named.prompts("test")] == [row["text"] for row in OTHERS]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": "prompt"}, "is it the other way round? columns = { prompt = 'text' }"),
        ({"promt": "text"}, "prompts have no 'promt'; did you mean 'prompt'?"),
        ("text", "columns: got 'text'; write columns = { prompt = 'text' }"),
    ],
)
def test_a_map_of_columns_that_is_none(columns: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        posttrain.rl(prompts=OTHERS, columns=columns, reward=shortness)


def test_columns_of_prompts_that_are_not_given() -> None:
    with pytest.raises(ValueError, match=r"^columns: .* Give prompts=…"):
        posttrain.rl(task="arithmetic", columns={"prompt": "text"})
