"""Files as people have them, in the conventions of others: read without a line of configuration."""

import csv
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.conventions import understood
from posttrain.data.preference_sets import read_labelled, read_preferences
from posttrain.data.row_files import open_table
from posttrain.data.sources import read_demonstrations
from posttrain.tasks.prompt_file import file_task, read_prompts

USER = {"role": "user", "content": "2+3?"}
FIVE = {"role": "assistant", "content": "5"}
SIX = {"role": "assistant", "content": "6"}
ALPACA = [
    {"instruction": "Add.", "input": "2+3", "output": "5"},
    {"instruction": "Say hello.", "input": "", "output": "Hello"},
]
GSM8K = [{"question": "Ann has 2,000 nuts and eats 80?", "answer": "2000-80=1920\n#### 1,920"}]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}], "id": 7}
]
VERL = [
    {
        "data_source": "sums",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 0},
    }
]
ULTRAFEEDBACK = [
    {
        "prompt": "2+3?",
        "chosen": [USER, FIVE],
        "rejected": [USER, SIX],
        "messages": [USER, FIVE],
        "score_chosen": 8.5,
        "score_rejected": 2.0,
    }
]
HH = [
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+3?\n\nAssistant: 5",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+3?\n\nAssistant: 6",
    }
]
HH_PROMPT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    USER,
)
KTO = [
    {"prompt": "2+3?", "completion": "5", "label": True},
    {"prompt": "2+3?", "completion": "6", "label": False},
]
TRL_CHATS = [{"prompt": [USER], "chosen": [FIVE], "rejected": [SIX]}]
OPENBMB = [
    {
        "instruction": "2+3?",
        "completions": [
            {"response": "5", "overall_score": 9.0},
            {"response": "6", "overall_score": 1.0},
        ],
    }
]


def write(folder: Path, rows: list[dict[str, Any]], name: str) -> Path:
    """The rows as the file that ``name`` says."""
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as opened:  # as Excel writes it
            writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\r\n")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:  # as Dataset.save_to_disk leaves it
        path.mkdir()
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (path / "state.json").write_text(json.dumps(state))
        (path / "dataset_info.json").write_text("{}")
    return path


def prompts(path: Path) -> list[Any]:
    """Of each prompt its text or messages, and the answer."""
    found = file_task(path=path).prompts("train")
    return [(p.text or p.messages, p.columns.get("answer")) for p in found]


def pairs(path: Path) -> list[Any]:
    return [(s.prompt or s.messages, s.completions) for s in read_preferences(path)]


def labels(path: Path) -> list[Any]:
    return [(row.prompt, row.completion, row.desirable) for row in read_labelled(path)]


EVERYDAY: dict[str, tuple[str, list[Any], Any, Any]] = {
    "GSM8K's questions, in Parquet": (
        "a.parquet",
        GSM8K,
        prompts,
        [(GSM8K[0]["question"], "1920")],
    ),
    "verl's prompts, in Parquet": ("a.parquet", VERL, prompts, [((USER,), "5")]),
    "TRL's prompts of messages, saved": (
        "saved",
        [{"prompt": [USER], "solution": "5"}],
        prompts,
        [((USER,), None)],
    ),
    "questions in a table of Excel": (
        "a.csv",
        [{"question": "2+3,\nor 5?", "answer": "5"}],
        prompts,
        [("2+3,\nor 5?", "5")],
    ),
    "Alpaca, one array": (
        "a.json",
        ALPACA,
        read_demonstrations,
        [
            {"prompt": "Add.\n\n2+3", "completion": "5"},
            {"prompt": "Say hello.", "completion": "Hello"},
        ],
    ),
    "ShareGPT, one array": ("a.json", SHAREGPT, read_demonstrations, [{"messages": [USER, FIVE]}]),
    "prompt and completion of messages": (
        "a.parquet",
        [{"prompt": [USER], "completion": [FIVE]}],
        read_demonstrations,
        [{"messages": [USER, FIVE]}],
    ),
    "TRL's pairs of chats": ("a.parquet", TRL_CHATS, pairs, [((USER,), ("5", "6"))]),
    "UltraFeedback, binarised": ("a.parquet", ULTRAFEEDBACK, pairs, [((USER,), ("5", "6"))]),
    "UltraFeedback, all completions": ("a.jsonl", OPENBMB, pairs, [("2+3?", ("5", "6"))]),
    "HH-RLHF": ("a.jsonl", HH, pairs, [(HH_PROMPT, ("5", "6"))]),
    "KTO in a table": ("a.csv", KTO, labels, [("2+3?", "5", True), ("2+3?", "6", False)]),
    "KTO for a reward model": ("a.jsonl", KTO, pairs, [("2+3?", ("5", "6"))]),
    "GSM8K to learn from": (
        "a.jsonl",
        GSM8K,
        read_demonstrations,
        [{"prompt": GSM8K[0]["question"], "completion": GSM8K[0]["answer"]}],
    ),
    "two texts with a common beginning": (
        "a.jsonl",
        [{"chosen": "The sky is blue.", "rejected": "The sky is bluish."}],
        pairs,
        [("The sky is", (" blue.", " bluish."))],
    ),
}


@pytest.mark.parametrize("what", EVERYDAY)
def test_an_everyday_file_is_read_as_it_stands(tmp_path: Path, what: str) -> None:
    name, rows, read, expected = EVERYDAY[what]
    assert read(write(tmp_path, rows, name)) == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "saved"])
def test_rows_are_the_same_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": "x"} for n in range(3)]
    found = file_task(path=write(tmp_path, rows, name)).prompts("train")
    assert [(p.text, dict(p.columns)) for p in found] == [
        (row["prompt"], {"answer": row["answer"], "level": "x"}) for row in rows
    ]


def test_columns_stay_for_rewards_and_what_was_understood_is_said(tmp_path: Path) -> None:
    task = file_task(path=write(tmp_path, VERL, "a.parquet"))
    columns = task.prompts("train")[0].columns
    assert set(columns) == {"data_source", "reward_model", "extra_info", "answer"}
    assert task.told.endswith(
        "read as prompts: messages from prompt, answer from reward_model.ground_truth; the first "
        'is {"messages": ["2+3?"], "answer": "5"}; for rewards: data_source, reward_model, '
        "extra_info"
    )
    mixed = write(tmp_path, [GSM8K[0], {"question": "1+1?", "answer": "2"}], "b.jsonl")
    assert "prompt from question, answer behind #### (1 of 2)" in understood("prompts", mixed)


def test_a_large_file_is_read_no_further_than_asked(tmp_path: Path) -> None:
    """The rest may be damaged: nobody looks there."""
    path = write(tmp_path, ALPACA, "a.jsonl")
    path.write_text(path.read_text() + "{oops")
    assert len(read_demonstrations(path, limit=2)) == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_in_one_piece_is_read_in_parts(tmp_path: Path, kind: str) -> None:
    """However large its one row group or batch: what is in memory is a fraction of it."""
    rng, path = np.random.default_rng(0), tmp_path / f"a.{kind}"
    table = pa.table({"text": [rng.bytes(500).hex() for _ in range(16_384)]})
    size = table.nbytes
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2**30, use_dictionary=False)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_batch(table.to_batches()[0])
    del table
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        rows = iter(open_table(path).rows)
        next(rows)
        used = tracemalloc.get_traced_memory()[1] + max(0, pa.total_allocated_bytes() - before)
    finally:
        tracemalloc.stop()
    assert used < size / 3
    assert sum(1 for _ in rows) == 16_383


def test_the_parts_of_a_download(tmp_path: Path) -> None:
    for part in range(2):
        rows = [{"prompt": f"{part}{n}+1=", "answer": "1"} for n in range(2)]
        write(tmp_path, rows, f"train-0000{part}-of-00002.parquet")
    assert [text for text, _ in prompts(tmp_path)] == ["00+1=", "01+1=", "10+1=", "11+1="]


def test_rows_made_to_take_long_do_not(tmp_path: Path) -> None:
    """Minutes each, if every place were compared with every other."""
    for behind in ("####" * 100_000, "#### a" + " " * 400_000 + "b"):
        (found,) = read_prompts([{"prompt": "1+1=", "answer": f"{behind}\n2"}])[0].values()
        assert found.columns["answer"].endswith("\n2")
    (tmp_path / "wide.csv").write_text(",".join(f"c{n}" for n in range(200_000)))
    with pytest.raises(ValueError, match="holds no rows"):
        read_prompts(tmp_path / "wide.csv")


def test_a_number_of_numpy_is_a_number_under_every_name() -> None:
    for name in ("answer", "ground_truth"):
        (found,) = read_prompts([{"prompt": "1+1=", name: np.int64(2)}])[0].values()
        assert found.columns["answer"] == "2"
