"""A hundred mistakes of a user with a file: each is told with its place and a way to fix it.

No traceback of a library, and no row that vanishes: what is read in spite of it is read whole.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.build.rows import data_name
from posttrain.data.preference_sets import read_labelled, read_preferences
from posttrain.data.row_checks import check_text
from posttrain.data.sources import read_demonstrations
from posttrain.registry import Function
from posttrain.tasks import make_task

USER = {"role": "user", "content": "2+3?"}
FIVE = {"role": "assistant", "content": "5"}
SIX = {"role": "assistant", "content": "6"}
ROW = {"prompt": "1+1=", "answer": "2"}
SHOWN = {"prompt": "1+1=", "completion": "2"}
PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}
SCORED = {"prompt": "2+3=", "completion": "5", "score": 1}


def prompts(path: Any, **columns: str) -> Any:
    return make_task({"name": "file", "path": path, "columns": columns}).prompts("train")


def table(*rows: dict[str, Any], cut: int = 0) -> Callable[[Path], None]:
    """Rows as a Parquet file, without its last ``cut`` bytes."""

    def write(path: Path) -> None:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - cut])

    return write


def twice(path: Path) -> None:
    columns = [pa.array(["1+1="]), pa.array(["2"]), pa.array(["3"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "answer", "answer"]), path)


def saved(state: str, *, arrow: bytes = b"") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "state.json").write_text(state)
        if arrow:
            (path / "a.arrow").write_bytes(arrow)

    return write


def two_files(path: Path) -> None:
    path.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (path / name).write_text(json.dumps(ROW))


def splits(path: Path) -> None:
    saved("{}")(path)
    (path / "state.json").rename(path / "dataset_dict.json")
    saved("{}")(path / "train")


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


STATE = '{"_data_files": [{"filename": "a.arrow"}]}'
P, D, C, K = prompts, read_demonstrations, read_preferences, read_labelled
# (the file, what it holds, who reads it, what is said; or how many rows are read all the same)
MISTAKES: list[tuple[str, Any, Function, str | int]] = [
    # Names and kinds of files.
    ("a.jsonl", None, P, "there is no such file"),
    ("data/a.parquet", None, P, "there is no such file"),
    ("owner/name", None, P, r"no such file or folder here; .*posttrain\[hub\]"),
    ("a.jsonl", two_files, P, r"is a folder; give the path of a file .* Known: test.jsonl, train"),
    ("a.jsonl", Path.mkdir, P, "is a folder; give the path of a file in it. Known: none"),
    ("a", splits, P, "holds the splits of a data set; name one of them: .*train"),
    ("a", saved("{oops"), P, "state.json is damaged"),
    ("a", saved("[]"), P, "state.json is damaged"),
    ("a", saved(STATE), P, "a.arrow is missing; copy the whole folder again"),
    ("a", saved(STATE, arrow=b"junk"), P, "damaged or cut short"),
    ("a", saved('{"_data_files": [], "_indices_data_files": [1]}'), P, "flatten_indices"),
    ("a.jsonl", b"\x1f\x8b\x08", P, "is a gzip archive; unpack it"),
    ("a.xlsx", b"PK\x03\x04", P, "an Excel sheet; unpack it, or save the sheet as CSV"),
    ("a.csv", b"PK\x03\x04", P, "an Excel sheet"),
    ("a.pkl", b"\x80\x04abc", P, "is a pickle, which may run code"),
    ("a.npy", b"\x93NUMPY", P, "is an array of numpy"),
    ("a.db", b"SQLite format 3", P, "is an SQLite database"),
    ("a.txt", "one\ntwo\n", D, r"is plain text; write JSONL, .*splitlines\(\) line by line"),
    ("a.txt", lines(ROW), P, 1),
    ("a.jsonl", lines(ROW).encode("utf-16"), P, "is UTF-16 text; convert it"),
    ("a.jsonl", lines(ROW).encode("utf-16-le"), P, "NUL bytes"),
    ("a.csv", "prompt,answer\n1,2".encode("utf-16"), P, "is UTF-16 text; convert it"),
    ("a.jsonl", "", P, "holds no rows"),
    ("a.json", "", P, "holds no rows"),
    ("a.csv", "", P, "holds no rows"),
    ("a.csv", "prompt,answer\n", P, "holds no rows"),
    ("a.json", "[]", P, "holds no rows"),
    ("a.parquet", b"", P, "damaged or cut short"),
    ("a.parquet", lines(ROW), P, "damaged or cut short"),
    ("a.parquet", table(), P, "holds no rows"),
    ("a.parquet", table(ROW, cut=9), P, "damaged or cut short"),
    ("a.parquet", table(ROW, cut=400), P, "damaged or cut short"),
    ("a.parquet", twice, P, "two columns are called 'answer'"),
    # Text.
    ("a.jsonl", b"\xef\xbb\xbf" + lines(ROW).encode(), P, 1),
    ("a.jsonl", lines(ROW, {**ROW, "prompt": "x"}).replace("\n", "\r\n\r\n"), P, 2),
    ("a.csv", b"\xef\xbb\xbfprompt,answer\r\n1+1=,2\r\n", P, 1),
    ("a.jsonl", b'{"prompt": "\xe9"}', P, ":1: not UTF-8 .* iconv"),
    ("a.csv", b"prompt\nok\n\xe9\n", P, ":3: not UTF-8"),
    ("a.json", b'[{"prompt":\n"\xe9"}]', P, ":2: not UTF-8"),
    ("a.jsonl", lines(ROW) + "\n\0", P, ":2: NUL bytes"),
    ("a.jsonl", lines({"prompt": "a\ud800"}), P, "half of a character"),
    # JSON.
    ("a.jsonl", lines(ROW, '{"prompt": "x"'), P, ":2: not valid JSON"),
    ("a.jsonl", '{"prompt": "x",}', P, ":1: not valid JSON"),
    ("a.jsonl", "{'prompt': 'x'}", P, ":1: not valid JSON"),
    ("a.jsonl", '{"prompt": "x"} {"prompt": "y"}', P, r":1: not valid JSON \(Extra data"),
    ("a.jsonl", '{"prompt": "x", "answer": NaN}', P, "NaN is not JSON"),
    ("a.jsonl", '{"prompt": "x", "answer": Infinity}', P, "Infinity is not JSON"),
    ("a.jsonl", '{"prompt": "x", "answer": 1e999}', P, "'answer' must be text, got Infinity"),
    ("a.jsonl", '{"prompt": "x", "prompt": "y"}', P, "the key 'prompt' occurs twice"),
    ("a.jsonl", '{"prompt": "x", "m": {"a": 1, "a": 2}}', P, "the key 'a' occurs twice"),
    ("a.jsonl", lines(ROW, "7"), P, ":2: expected a JSON object like {…}, got 7"),
    ("a.jsonl", lines(ROW, '"1+1="'), P, ":2: expected a JSON object"),
    ("a.jsonl", lines(ROW, "null"), P, ":2: expected a JSON object"),
    ("a.jsonl", '{"a": ' * 20_000, P, ":1: not valid JSON"),
    ("a.json", '[{"prompt": "x"}, 5]', P, "row 2: expected a JSON object"),
    ("a.json", '[{"prompt": "x"}', P, ":1: not valid JSON"),
    ("a.json", '{"data": [{"prompt": "x"}], "version": 1}', P, 1),
    ("a.json", '{\n"train": [{"prompt": "x"}], "test": [{"prompt": "y"}]}', P, "one object with"),
    ("a.json", lines(ROW, {**ROW, "prompt": "x"}), P, 2),
    # CSV.
    ("a.csv", "prompt;answer\n1+1=;2\n", P, 1),
    ("a.tsv", "prompt\tanswer\n1, 2\t2\n", P, 1),
    ("a.csv", "prompt,answer\n1, 2 or 3,2\n", P, ":2: 3 cells under 2 columns"),
    ("a.csv", "prompt,answer\n1+1=\n", P, ":2: 1 cells under 2 columns"),
    ("a.csv", 'prompt,answer\n"1+1=,2\n', P, ":2: not valid CSV"),
    ("a.csv", 'prompt,answer\n"a "b" c",2\n', P, ":2: not valid CSV"),
    ("a.csv", "prompt,answer,answer\n1,2,3\n", P, "two columns are called 'answer'"),
    ("a.csv", "prompt,answer\n,2\n", P, ":2: 'prompt' is empty"),
    ("a.csv", "prompt,answer\nx,\n", P, ":2: 'answer' is empty"),
    ("a.csv", "prompt\n" + "x" * 200_000 + "\n", P, 1),
    ("a.csv", "prompt,completion,label\nx,y,maybe\n", K, "'label' must be true or false"),
    # Columns.
    ("a.jsonl", lines({"promt": "x"}), P, r"no column 'prompt' .* columns = { prompt = 'promt' }"),
    ("a.jsonl", lines({"Prompt": "x"}), P, "columns = { prompt = 'Prompt' }"),
    ("a.jsonl", lines({"text": "x"}), P, "columns = { prompt = 'text' }"),
    ("a.jsonl", lines({}), P, "no column 'prompt' .the row has none"),
    ("a.jsonl", lines(ROW, {"answer": "5"}), P, ":2: no column 'prompt'"),
    ("a.jsonl", lines({**ROW, "messages": [USER]}), P, "both 'prompt' and 'messages'; keep one"),
    ("a.jsonl", lines(SHOWN), P, "'completion' would hide .* columns = { answer = 'completion' }"),
    ("a.jsonl", lines({"prompt": "x"}), D, "no column 'completion'"),
    ("a.jsonl", lines({"texts": "x"}), D, "no column 'prompt'"),
    ("a.jsonl", lines({"text": 3}), D, "'text' must be text, got 3"),
    ("a.jsonl", lines({"text": " "}), D, "'text' is empty"),
    ("a.jsonl", lines({"text": "x", "prompt": "y"}), D, "no column 'completion'"),
    ("a.jsonl", lines({"prompt": "x"}), C, "columns of no kind; give it 'chosen'"),
    ("a.jsonl", lines({"prompt": "x", "chosen": "y"}), C, "no column 'rejected'"),
    ("a.jsonl", lines({"chosen": "yes", "rejected": "no"}), C, "no column 'prompt'"),
    ("a.jsonl", lines({**PAIR, "ranked": ["5", "6"]}), C, "of pairs and of ranked sets"),
    ("a.jsonl", lines(PAIR, SCORED), C, ":2: of labelled completions, but .*:1 is of pairs"),
    # Values.
    ("a.jsonl", lines({"prompt": ""}), P, "'prompt' is empty"),
    ("a.jsonl", lines({"prompt": " \n"}), P, "'prompt' is empty"),
    ("a.jsonl", lines({"prompt": 5}), P, "'prompt' must be text, got 5; put it in quotes"),
    ("a.jsonl", lines({"prompt": None}), P, "'prompt' must be text, got null"),
    ("a.jsonl", lines({"prompt": ["x"]}), P, "message 1: expected role and content"),
    ("a.jsonl", lines({"prompt": []}), P, "must be a list of at least one"),
    ("a.jsonl", lines({"prompt": {"role": "user"}}), P, "'prompt' must be text"),
    ("a.jsonl", lines({**ROW, "answer": None}), P, "'answer' must be text, got null"),
    ("a.jsonl", lines({**ROW, "answer": ["2"]}), P, "'answer' must be text"),
    ("a.jsonl", lines({**ROW, "answer": True}), P, "'answer' must be text, got true"),
    ("a.jsonl", lines(ROW, {"prompt": "x"}), P, ":2: no answer, while other rows have one"),
    ("a.jsonl", lines(ROW, {**ROW, "answer": "3"}), P, ":2: the prompt of .*:1 again"),
    ("a.parquet", table({"prompt": "x", "answer": "1"}, {"prompt": "y"}), P, "row 2: no answer"),
    ("a.parquet", table({"prompt": None, "answer": "1"}), P, "row 1: 'prompt' must be text, got"),
    ("a.parquet", table({"prompt": b"x"}), P, "row 1: 'prompt' must be text, got b'x'"),
    ("a.parquet", table({"prompt": 5.5}), P, "row 1: 'prompt' must be text, got 5.5"),
    ("a.parquet", table({**ROW, "answer": float("nan")}), P, "'answer' must be text, got NaN"),
    # Chats.
    ("a.jsonl", lines({"messages": [USER, FIVE]}), P, "the last message is the assistant's"),
    ("a.jsonl", lines({"messages": [USER]}), D, "the last message is the user's"),
    ("a.jsonl", lines({"messages": "2+3?"}), D, "'messages' must be a list"),
    ("a.jsonl", lines({"messages": "[{oops"}), D, "'messages' must be a list"),
    ("a.jsonl", lines({"messages": [USER, {**FIVE, "content": None}]}), D, "message 2: 'content'"),
    ("a.parquet", table({"messages": [USER, {"role": "assistant"}]}), D, "message 2: 'content'"),
    ("a.jsonl", lines({"messages": [{"role": "bot", "content": "x"}]}), D, "must be one of"),
    ("a.jsonl", lines({"conversations": [{"from": "me", "value": "x"}]}), D, "must be one of"),
    ("a.jsonl", lines({"conversations": [{"from": "human"}]}), D, "'content' must be text"),
    (
        "a.jsonl",
        lines({"messages": [{"role": "user", "content": [{"type": "image"}]}, FIVE]}),
        D,
        "message 1: 'content' must be text",
    ),
    # Preferences.
    ("a.jsonl", lines({**PAIR, "rejected": "5"}), C, "are the same text"),
    ("a.jsonl", lines({**PAIR, "chosen": [FIVE]}), C, "'rejected' is not there or no chat"),
    ("a.jsonl", lines({"chosen": [FIVE], "rejected": [SIX]}), C, "must share the whole prompt"),
    ("a.jsonl", lines({**PAIR, "chosen": [USER, FIVE], "rejected": [USER, SIX]}), C, "begin with"),
    ("a.jsonl", lines({**SCORED, "score": "high"}), C, "'score' must be a number, got 'high'"),
    ("a.parquet", table({**SCORED, "score": float("nan")}), C, "'score' must be a number, got nan"),
    ("a.jsonl", lines({**SCORED, "label": "yes"}), K, "'label' must be true or false, got 'yes'"),
    ("a.jsonl", lines({"prompt": "x", "completions": ["a"]}), C, "'completions' needs 'scores'"),
    (
        "a.jsonl",
        lines({"prompt": "x", "completions": ["a", "b"], "scores": [1]}),
        C,
        "'completions' needs 'scores'",
    ),
    (
        "a.jsonl",
        lines({"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: c\n\nAssistant: d"}),
        C,
        "begin with 0 shared messages",
    ),
]  # fmt: skip


def test_there_are_a_hundred_of_them() -> None:
    assert len(MISTAKES) >= 100


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_told_or_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    name, content, read, expected = MISTAKES[number]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # whether it is installed here or not
    path = Path(name)
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, int):
        assert len(read(name)) == expected
        return
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as raised:
        read(name)
    assert str(raised.value).startswith(name), "it does not say where"
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "data: holds no rows"),
        (5, "data: expected a list of rows, got int"),
        ({"prompt": ["x"]}, "data: expected a list of rows, got dict"),
        ([5], r"data\[0\]: expected text or a dict"),
        ([{"prompt": b"x"}], r"data\[0\]: 'prompt' is nothing that JSON can hold"),
        ([{"prompt": "x", "score": float("nan")}], r"data\[0\]: 'score' is nothing that JSON"),
    ],
)
def test_mistakes_with_rows_in_python(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_name(rows)


def test_strings_to_learn_from_are_texts() -> None:
    texts = read_demonstrations(data_name(["one", "two"]))
    assert texts == [{"text": "one"}, {"text": "two"}]


class Hub:
    """As the package ``datasets``, of which one data set is known."""

    asked: tuple[Any, ...] = ()

    @classmethod
    def load_dataset(cls, *name: Any, **options: Any) -> list[dict[str, Any]]:
        cls.asked = (*name, options)
        if name[0] != "openai/gsm8k":
            raise ConnectionError("Couldn't reach the Hub")
        return [{"question": "2+3?", "answer": "2+3=5\n#### 5"}]


def test_a_hub_id_is_streamed_and_offline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub)  # type: ignore[arg-type]
    (prompt,) = prompts("openai/gsm8k:main:test")
    assert (prompt.text, prompt.columns["answer"]) == ("2+3?", "5")
    assert Hub.asked == ("openai/gsm8k", "main", {"split": "test", "streaming": True})
    message = r"^trl-lib/tldr: neither a file here nor .*ConnectionError.*save_to_disk"
    with pytest.raises(ValueError, match=message):
        prompts("trl-lib/tldr")


@pytest.mark.parametrize(
    ("row", "column", "hint"),
    [
        ({"prompt": "a"}, "completion", r"\(the row has 'prompt'\); add it$"),
        ({"prompt": "a", "answr": "b"}, "answer", r"columns=\{'answer': 'answr'\}\)$"),
    ],
)
def test_no_column_that_has_a_meaning_is_proposed_for_another(
    row: dict[str, str], column: str, hint: str
) -> None:
    with pytest.raises(ValueError, match=hint):
        check_text(row, column, where="rows.jsonl:1")
