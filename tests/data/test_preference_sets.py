"""Preferences from JSONL: what is read of each kind of rows, and what every fault says."""

import json
import math

import pytest

from posttrain.data import row_files
from posttrain.data.preference_sets import Ranked, read_preferences, write_preferences

USER = {"role": "user", "content": "2+3?"}
FIVE = {"role": "assistant", "content": "5"}
SIX = {"role": "assistant", "content": "6"}
SYSTEM = {"role": "system", "content": "Add."}
PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}
MESSAGES = {"messages": [USER], "chosen": "5", "rejected": "6"}
CHATS = {"chosen": [USER, FIVE], "rejected": [USER, SIX]}
RANKED = {"prompt": "2+3=", "ranked": ["5", "6", "fish"]}
LABEL = {"prompt": "2+3=", "completion": "5", "score": 1}


def write(tmp_path, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def label(completion, score, *, prompt="p"):
    return {"prompt": prompt, "completion": completion, "score": score}


def ranked(*completions, prompt="p"):
    return Ranked(prompt=prompt, completions=completions)


def without(row, column):
    return {name: value for name, value in row.items() if name != column}


def test_pairs_of_text_and_of_chats(tmp_path):
    rows = [PAIR, MESSAGES | {"messages": [SYSTEM, USER], "margin": 2, "by": "me"}]
    first, second = read_preferences(write(tmp_path, rows))
    assert first == Ranked(prompt="2+3=", completions=("5", "6"), margin=0.0)
    assert second == Ranked(prompt="", messages=(SYSTEM, USER), completions=("5", "6"), margin=2.0)
    assert isinstance(second.margin, float)  # a column of whole numbers must not become integers


def test_ranked_sets_keep_their_order(tmp_path):
    rows = [RANKED, {"messages": [USER], "ranked": ["z", "a"], "margin": 0.5}]
    assert read_preferences(write(tmp_path, rows)) == [
        Ranked(prompt="2+3=", completions=("5", "6", "fish")),
        Ranked(prompt="", messages=(USER,), completions=("z", "a"), margin=0.5),
    ]


def test_chats_that_share_their_prompt(tmp_path):
    turns = [USER, FIVE, {"role": "tool", "content": "ok"}]
    rows = [CHATS | {"margin": 1.5}, {"chosen": [*turns, SIX], "rejected": [*turns, FIVE]}]
    assert read_preferences(write(tmp_path, rows)) == [
        Ranked(prompt="", messages=(USER,), completions=("5", "6"), margin=1.5),
        Ranked(prompt="", messages=tuple(turns), completions=("6", "5")),
    ]


ELSE = [{"role": "user", "content": "3+2?"}, SIX]
FAULTS = [
    (without(PAIR, "prompt"), "no column 'prompt'"),
    (without(PAIR, "chosen"), "no column 'chosen'"),
    (without(PAIR, "rejected"), "no column 'rejected'"),
    (without(PAIR, "chosen") | {"accepted": "5"}, "no column 'chosen' .*= 'accepted' }"),
    (PAIR | {"prompt": " "}, "'prompt' is empty"),
    (PAIR | {"prompt": "a\ud800b"}, "'prompt' has half of a character"),
    (PAIR | {"prompt": [USER, FIVE]}, "the last message is the assistant's; a prompt ends with"),
    (PAIR | {"messages": [USER]}, "the row has both 'prompt' and 'messages'; remove one"),
    (PAIR | {"chosen": ""}, "'chosen' is empty"),
    (PAIR | {"rejected": None}, "'rejected' must be text, got null"),
    (PAIR | {"rejected": "5"}, "completions: number 1 and number 2, .* same text .*; fix one"),
    (PAIR | {"rejected": " 5\n"}, "completions: number 1 and number 2, .* are the same text"),
    (PAIR | {"margin": -0.5}, "margin: must be a number of at least 0, got -0.5; leave it out"),
    (PAIR | {"margin": True}, "margin: must be a number of at least 0, got True"),
    (PAIR | {"margin": "1"}, "margin: must be a number of at least 0, got '1'"),
    (PAIR | {"margin": None}, "margin: must be a number of at least 0, got None"),
    (PAIR | {"margin": math.nan}, "not valid JSON .NaN is not JSON"),
    (PAIR | {"margin": "1e999"}, "margin: must be a number of at least 0, got inf"),
    (PAIR | {"margin": 10**400}, "margin: must be a number of at least 0, got 1000"),
    # Chats that begin with the prompt.
    (CHATS | {"prompt": "3+3="}, "'prompt' is not what 'chosen' and 'rejected' begin with; remove"),
    (CHATS | {"messages": [SYSTEM]}, "'prompt' is not what 'chosen' and 'rejected' begin with"),
    (CHATS | {"rejected": "6"}, "'rejected' is not there or no chat; write both alike"),
    (CHATS | {"chosen": "5"}, "'chosen' is not there or no chat"),
    (without(CHATS, "rejected"), "'rejected' is not there or no chat"),
    (CHATS | {"chosen": []}, "'chosen': 'messages' must be a list of at least one"),
    (CHATS | {"rejected": [USER, "6"]}, "'rejected': message 2: expected role and content"),
    (CHATS | {"rejected": [USER, FIVE]}, "completions: number 1 and number 2, .* same text"),
    (CHATS | {"rejected": ELSE}, ".* 0 shared messages, .* user.assistant and of user.assistant"),
    ({"chosen": [FIVE], "rejected": [SIX]}, ".* begin with 0 shared messages, .* share the whole"),
    (CHATS | {"rejected": [USER, FIVE, *ELSE]}, ".* 1 shared .* assistant and of .* exactly one"),
    (CHATS | {"chosen": [USER, USER]}, ".* 1 shared messages, .* of user and of assistant"),
    ({"chosen": [USER, SIX, FIVE], "rejected": [USER, SIX, SIX]}, ".* last .* the assistant's"),
    (MESSAGES | {"messages": []}, "'messages' must be a list of at least one"),
    (MESSAGES | {"messages": [{"role": "robot"}]}, "message 1: the role must be one of"),
    (MESSAGES | {"messages": [USER, FIVE]}, "the last .* assistant's; a prompt ends with the user"),
    (MESSAGES | {"messages": [SYSTEM]}, "the last message is the system's; a prompt ends with"),
    # Ranked sets.
    (RANKED | {"ranked": "5"}, "'ranked' must be a list of texts, the best first"),
    (RANKED | {"ranked": []}, "completions: a preference is between at least 2, got 0; add what"),
    (RANKED | {"ranked": ["5"]}, "completions: a preference is between at least 2, got 1"),
    (RANKED | {"ranked": ["5", ""]}, "completions: 'number 2' is empty"),
    (RANKED | {"ranked": ["5", 6]}, "completions: 'number 2' must be text, got 6"),
    (RANKED | {"ranked": ["5", "6", "5 "]}, "completions: number 1 and number 3, .* same text"),
    # Labelled completions.
    (without(LABEL, "prompt"), "no column 'prompt'"),
    (without(LABEL, "completion"), "no column 'completion'"),
    (without(LABEL, "score"), "'score' is not there; write a number, true or false"),
    (LABEL | {"completion": "\n"}, "'completion' is empty"),
    (LABEL | {"score": "1"}, "'score' must be a number, got '1'; write"),
    (LABEL | {"score": None}, "'score' must be a number, got None"),
    (LABEL | {"score": math.nan}, "not valid JSON .NaN is not JSON"),
    (LABEL | {"score": "1e999"}, "'score' must be a number, got inf"),
    (LABEL | {"score": 10**400}, "'score' must be a number, got 1000"),
    (LABEL | {"margin": 1}, "'margin' is a pair's, and this row is none; remove it"),
    (without(LABEL, "prompt") | {"messages": [USER, FIVE]}, "the last message is the assistant's"),
    ({"prompt": "2+3="}, "the row has columns of no kind; give it 'chosen'"),
    (PAIR | RANKED, "the row has columns of pairs and of ranked sets; give it 'chosen'"),
]


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_faults_name_the_line_and_say_what_to_do(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    text = json.dumps(row).replace('"1e999"', "1e999")  # the one way to write infinity in JSON
    file.write_text("\n" + text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: " + message):
        read_preferences(file)


def test_a_file_holds_one_kind_of_rows(tmp_path):
    message = r"rows\.jsonl:3: of ranked sets, but .*rows\.jsonl:1 is of pairs; split the file"
    with pytest.raises(ValueError, match=message):
        read_preferences(write(tmp_path, [PAIR, CHATS, RANKED]))
    message = r"rows\.jsonl:2: of pairs, but .*rows\.jsonl:1 is of labelled completions"
    with pytest.raises(ValueError, match=message):
        read_preferences(write(tmp_path, [LABEL, PAIR]))


def test_scores_make_every_pair_that_they_decide(tmp_path):
    """Scores 1, 3, 3, 2 of one prompt: six pairs of which 3 = 3 decides nothing, so five."""
    scored = {"a": 1, "b": 3.0, "c": 3, "d": 2}
    rows = [label(text, score) for text, score in scored.items()]
    rows.insert(2, label("n", False, prompt="q"))  # prompts need not stand together
    sets = read_preferences(write(tmp_path, [*rows, label("y", True, prompt="q")]))
    found = ["".join((one.prompt, *one.completions)) for one in sets]
    assert found == ["pba", "pca", "pda", "pbd", "pcd", "qyn"]


def test_chats_with_the_same_messages_are_one_prompt(tmp_path):
    rows = [{"messages": [USER], "completion": text, "score": int(text)} for text in ("5", "6")]
    rows += [{"messages": [{**USER, "role": "tool"}], "completion": "7", "score": 7}]
    with pytest.warns(UserWarning, match="1 of 2 prompts are left without a pair"):
        sets = read_preferences(write(tmp_path, rows))
    assert sets == [Ranked(prompt="", messages=(USER,), completions=("6", "5"))]


def test_prompts_without_a_pair_are_counted(tmp_path):
    rows = [label("a", 1), label("b", 0), label("c", 1, prompt="alone")]
    rows += [label("d", 1, prompt="same"), label("e", 1, prompt="same")]
    # One text with two scores is no pair: it cannot be better than itself.
    rows += [label("f", 0, prompt="moody"), label(" f", 1, prompt="moody")]
    with pytest.warns(UserWarning, match=r"rows\.jsonl: 3 of 4 prompts are left without a pair"):
        assert read_preferences(write(tmp_path, rows)) == [ranked("a", "b")]
    with pytest.raises(ValueError, match=r"rows\.jsonl: no prompt has two .* score more"):
        read_preferences(write(tmp_path, rows[2:]))


def test_pairs_of_a_prompt_are_capped_by_a_seeded_draw(tmp_path):
    """Eight completions with eight scores have 28 pairs."""
    rows, other = ([label(str(n), n, prompt=prompt) for n in range(8)] for prompt in "pq")
    file = write(tmp_path, rows + other)
    with pytest.warns(UserWarning, match="2 of 2 prompts have more than 16 pairs, of which 16"):
        capped = read_preferences(file)
    every = [one.completions for one in read_preferences(file, max_pairs_per_prompt=28)]
    assert len(every) == 28 + 28
    drawn, others = ([one.completions for one in capped if one.prompt == name] for name in "pq")
    assert len(drawn) == len(set(drawn)) == len(others) == len(set(others)) == 16
    assert all(int(better) > int(worse) for better, worse in drawn + others)
    assert len({frozenset(part) for part in (drawn, others, every[:16])}) == 3
    with pytest.warns(UserWarning, match="more than 16"):
        again = [one.completions for one in read_preferences(file, seed=1)]
    assert set(again[:16]) != set(drawn)
    with pytest.warns(UserWarning, match="more than 16"):  # what stands around it changes nothing
        assert read_preferences(write(tmp_path, other + rows)) == capped[16:] + capped[:16]
    with pytest.raises(ValueError, match="max_pairs_per_prompt: must be at least 1, got 0"):
        read_preferences(file, max_pairs_per_prompt=0)


def test_repeated_rows_are_kept_and_reported(tmp_path):
    rows = [PAIR, {**PAIR, "margin": 1}, PAIR, PAIR]  # another margin says something else
    with pytest.warns(UserWarning, match=r"2 of 4 rows repeat .*:3\) and are kept") as caught:
        assert len(read_preferences(write(tmp_path, rows))) == 4
    assert caught[0].filename == __file__
    rows = [label("a", 1), label("b", 0), label("a", True)]
    with pytest.warns(UserWarning, match=r"1 of 3 rows repeat .*:3\)"):
        assert read_preferences(write(tmp_path, rows)) == [ranked("a", "b"), ranked("a", "b")]


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        # The second and third line contradict each other; another prompt or order does not.
        ([PAIR | {"prompt": "x"}, PAIR, PAIR | {"chosen": "6", "rejected": "5"}], "2 of 3 .*66.7%"),
        # 5 > fish in the first, fish > 5 in the second; 5 > 6 in the third agrees with the first.
        ([RANKED, RANKED | {"ranked": ["fish", "5"]}, RANKED | {"ranked": ["5", "6"]}], "2 of 3"),
        # Of a with 0 and with 2, b with 1 is both worse and better.
        ([label("a", 2), label("b", 1), label("a", 0)], r"2 of 2 preferences \(100.0%\)"),
    ],
)
def test_contradictions_are_kept_and_reported(tmp_path, rows, share):
    with pytest.warns(UserWarning, match=f"{share}.* are contradicted .* kept") as caught:
        sets = read_preferences(write(tmp_path, rows))
    assert len(caught) == 1
    assert len(sets) == int(share[5])


def test_unicode_blank_lines_and_line_ends(tmp_path):
    row = {"prompt": "¿2+3?", "chosen": "五\u2028", "rejected": "seis 🐟"}
    text = "\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n  \n" + json.dumps(PAIR)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text.encode())
    first, _ = read_preferences(str(file))
    assert first == ranked("五\u2028", "seis 🐟", prompt="¿2+3?")
    file.write_bytes((text + "\n" + json.dumps(RANKED)).encode())
    with pytest.raises(ValueError, match=r"rows\.jsonl:5: .*rows\.jsonl:1 "):
        read_preferences(file)


def test_no_file_and_too_much(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_preferences(tmp_path / "none.jsonl")
    monkeypatch.setattr(row_files, "MAX_FILE_BYTES", 20)
    with pytest.raises(ValueError, match="split the file"):
        read_preferences(write(tmp_path, [PAIR]))


def test_what_is_written_is_read_back_as_it_was(tmp_path):
    chat = ({"role": "system", "content": "\U0001f600 alone"}, USER)
    sets = [
        ranked("五\u2028\n", ' "6" ', "\\n", prompt="\t¿2+3?\n"),
        Ranked(prompt="", messages=chat, completions=("b", "a"), margin=0.1 + 0.2),
        Ranked(prompt="p", completions=("a", "b"), margin=5e-324),
    ]
    write_preferences(tmp_path / "out.jsonl", sets)
    with pytest.raises(ValueError, match=r"out\.jsonl: there are no preferences to write"):
        write_preferences(tmp_path / "out.jsonl", [])
    assert read_preferences(tmp_path / "out.jsonl") == sets


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: give either text or messages"),
        ({"messages": (USER,)}, "prompt: give either text or messages, and not both"),
        ({"margin": math.nan}, "margin: must be a number of at least 0, got nan"),
    ],
)
def test_sets_made_in_python_keep_the_same_rules(fields, message):
    with pytest.raises(ValueError, match=message):
        Ranked(**{"prompt": "p", "completions": ("a", "b"), **fields})
