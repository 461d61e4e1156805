"""JSONL files: what is read, and what every fault says."""

import json

import pytest

from posttrain.data import row_files
from posttrain.data.sources import read_demonstrations, read_numbered


def read_jsonl(path):
    return [row for _, row in read_numbered(path)]


def write(tmp_path, text, *, encoding="utf-8"):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text.encode(encoding) if isinstance(text, str) else text)
    return file


def test_blank_lines_a_mark_at_the_start_and_other_line_ends(tmp_path):
    text = '\ufeff{"a": 1}\r\n\n   \n{"a": "x\u2028y"}'  # U+2028 is no end of a line in JSON
    file = write(tmp_path, text)
    assert read_jsonl(file) == [{"a": 1}, {"a": "x\u2028y"}]
    assert [line for line, _ in read_numbered(str(file))] == [1, 4]


def test_rows_are_the_callers_own(tmp_path):
    file = write(tmp_path, '{"a": [1]}')
    read_jsonl(file)[0]["a"].append(7)
    assert read_jsonl(file) == [{"a": [1]}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not valid JSON \(Expecting value at column"),
        (
            '{"a": 1\n{"a": 2}\n',
            r"rows\.jsonl:1: not valid JSON \(Expecting ',' delimiter at column 8\)",
        ),
        ('{"a": "', r"rows\.jsonl:1: not valid JSON \(Unterminated string starting at column 7\)"),
        ("{'a': 1}", r"rows\.jsonl:1: not valid JSON"),
        ('[{"a": 1},\n{"a": 2]', r"rows\.jsonl:2: not valid JSON \(Expecting ',' delimiter"),
        ('[{"a": 1}, 7]', r"rows\.jsonl: row 2: expected a JSON object like {…}, got 7"),
        ("\n\n7", r"rows\.jsonl:3: expected a JSON object like {…}, got 7"),
        ('{"a": NaN}', r"rows\.jsonl:1: not valid JSON \(NaN is not JSON"),
        ('{"a": 1, "a": 2}', r"rows\.jsonl:1: .*the key 'a' occurs twice"),
        ("[" * 100_000, r"rows\.jsonl: not valid JSON"),
        (b'{"a": 1}\n{"a": "\xff"}', r"rows\.jsonl:2: not UTF-8 .*iconv"),
        ("", r"rows\.jsonl: holds no rows"),
        ("\n \n", r"rows\.jsonl: holds no rows"),
    ],
)
def test_faults_name_the_file_and_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_jsonl(write(tmp_path, text))


def test_no_file_a_folder_and_too_much(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is a folder"):
        read_jsonl(tmp_path)
    file = write(tmp_path, json.dumps({"a": "x" * 100}))
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", 50)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: a line of"):
        read_jsonl(file)
    monkeypatch.setattr(row_files, "MAX_FILE_BYTES", 50)
    with pytest.raises(ValueError, match="split the file"):
        read_jsonl(file)


CHAT = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


def test_demonstrations_of_both_kinds(tmp_path):
    rows = [{"prompt": "2+3=", "completion": "5"}, {"messages": CHAT, "source": "me"}]
    file = write(tmp_path, "\n".join(map(json.dumps, rows)))
    assert read_demonstrations(file) == [rows[0], {"messages": CHAT}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+3="}, r":1: no column 'completion' \(the row has 'prompt'\)"),
        ({"completion": "5"}, ":1: no column 'prompt'"),
        ({"prompt": "2+3=", "completion": " "}, ":1: 'completion' is empty"),
        ({"prompt": "", "completion": "5"}, ":1: 'prompt' is empty"),
        ({"prompt": "2+3=", "completion": 5}, ":1: .* must be text, got 5; put it in quotes"),
        ({"prompt": "2+3=", "completion": None}, ":1: .* got null; write text in its place, or"),
        ({"prompt": "2+3=", "completion": [5]}, r":1: .* got \[5\]; write text in its place"),
        ({"messages": []}, ":1: 'messages' must be a list of at least one"),
        ({"messages": "hi"}, ":1: 'messages' must be a list"),
        ({"messages": ["hi"]}, ":1: message 1: expected role and content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, ":1: message 1: the role must be one"),
        ({"messages": [{"content": "x"}]}, ":1: message 1: the role must be one of .* got null"),
        ({"messages": [CHAT[0], {"role": "assistant"}]}, ":1: message 2: no column 'content'"),
        ({"messages": CHAT[:1]}, ":1: the last message is the user's; a demonstration ends"),
    ],
)
def test_faults_of_demonstrations(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_demonstrations(write(tmp_path, json.dumps(row)))


def test_repeated_demonstrations_are_kept_and_reported(tmp_path):
    row = json.dumps({"prompt": "2+3=", "completion": "5"})
    file = write(tmp_path, "\n".join([row, row, json.dumps({"messages": CHAT}), row]))
    with pytest.warns(UserWarning, match=r"2 of 4 demonstrations repeat .*:2\) and are kept"):
        assert len(read_demonstrations(file)) == 4


def test_a_mistyped_file_is_told_its_neighbour(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"did you mean 'prompts\.jsonl'\?"):
        read_numbered(tmp_path / "promts.jsonl")
