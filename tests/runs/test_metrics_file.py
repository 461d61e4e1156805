"""Metrics read back: torn files, several lines for one step, missing values."""

import math
from pathlib import Path

import pytest

from posttrain.runs import frame, read_metrics
from posttrain.runs.metrics_file import to_columns


def test_only_the_last_line_may_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a"')
    assert read_metrics(path) == read_metrics(tmp_path) == [{"step": 1, "a": 0.5}]
    path.write_text("")
    assert read_metrics(path) == []


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"a": 1}', '{"step": 1, "a": "x"}', "null"])
def test_a_broken_line_in_the_middle_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r'metrics\.jsonl:2: expected \{"step": …'):
        read_metrics(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file; is this the folder of a stage"):
        read_metrics(tmp_path)


def test_a_frame_has_one_row_for_each_step_and_the_later_value() -> None:
    records = [
        {"step": 1, "a": 1.0, "b": math.inf},
        {"step": 2, "a": 2.0},
        {"step": 1, "c": 3.0, "a": 1.5},
    ]
    table = frame(records)
    assert table.column_names == ["step", "a", "b", "c"]
    assert [str(type_) for type_ in table.schema.types] == ["int64", "double", "double", "double"]
    assert table.to_pylist() == [
        {"step": 1, "a": 1.5, "b": math.inf, "c": 3.0},
        {"step": 2, "a": 2.0, "b": None, "c": None},
    ]
    assert frame([]).column_names == ["step"]


def test_columns_keep_every_record() -> None:
    assert to_columns([{"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}]) == {
        "step": [1, 1],
        "a": [1.0, None],
        "b": [None, 2.0],
    }
