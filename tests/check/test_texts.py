"""What the tokenizer makes of the data is said before the run, and questions are compared so."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run
from tokenizers import normalizers

import posttrain
from posttrain.build.questions import among, learned
from posttrain.build.setup import Setup, make_policy, make_setup
from posttrain.build.sft_rows import sft_rows
from posttrain.check import check_recipe
from posttrain.config import recipe_from_dict, resolve
from posttrain.data.token_texts import lost_characters
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.models.tiny import build_tokenizer

CHAT = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 128, "chat": True}


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


EVAL = {"problems": 1, "max_new_tokens": 16}


def chats(path: Path, *, test: str = "What is 1+1?") -> dict[str, Any]:
    """A task of chats, and its test problem."""
    rows = [{"prompt": f"What is {n}+2?", "answer": str(n + 2)} for n in range(4)]
    held_out = [{"messages": [{"role": "user", "content": test}], "answer": "2"}]
    train, test_file = lines(path / "train.jsonl", rows), lines(path / "test.jsonl", held_out)
    return {"name": "jsonl", "path": train, "test_path": test_file}


def given(path: Path, **sections: Any) -> dict[str, Any]:
    values = recipe(path / "run", rl=None, sft=None, rewards=None)
    del values["task"]
    return {**values, "model": {"name": "tiny", "options": CHAT}, **sections}


def test_a_run_says_what_the_data_spells_and_what_the_tokenizer_lacks(tmp_path: Path) -> None:
    rows = [{"prompt": "a<|end|>b", "completion": "1"}, {"prompt": "b", "completion": "é<|user|>"}]
    sft = {"data": lines(tmp_path / "rows.jsonl", rows), "batch_size": 2}
    values = given(tmp_path, sft=sft)
    del values["eval"]
    text = " ".join(small_run(values)[1].split())
    told = "2 of 2 demonstrations spell special tokens (<|end|> in 1, <|user|> in 1; the first is"
    assert f"caution: {told} number 1): read as text; leave it where" in text
    told = "1 of 2 demonstrations have characters that the tokenizer lacks: 'é' is read as"
    assert f"caution: {told} '<|unknown|>' (1 in all; the first is number 2); take a model" in text
    assert text.rindex("caution: ") < text.index("sft has no held-out loss")  # as it begins


def test_what_is_learned_is_the_text_unless_the_tokens_are_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "1<|end|>2"}]
    sft = {"data": lines(tmp_path / "rows.jsonl", rows), "evaluate_every": 0}
    ends = {}
    for special_tokens in ("text", "tokens"):
        values = given(tmp_path, sft=sft)
        del values["eval"]
        values["model"] = {**values["model"], "special_tokens": special_tokens}
        found = resolve(recipe_from_dict(values))
        policy = make_policy(found, "tiny", device="cpu")
        setup = make_setup(found, policy, device="cpu")
        [(tokens, mask)] = sft_rows(setup).train
        learned = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
        ends[special_tokens] = learned.count(policy.tokenizer.eos_token_id)
    assert ends == {"text": 1, "tokens": 2}


def test_from_python_an_evaluation_says_it_too(tmp_path: Path) -> None:
    rows = [{"prompt": "é<|end|>", "answer": "1"}]
    options = {"model_options": {"options": CHAT}, "grading": {"workers": 0}}
    with (
        pytest.warns(UserWarning, match="1 of 1 test prompts spell special tokens"),
        pytest.warns(UserWarning, match="1 of 1 test prompts have characters that the tokenizer"),
    ):
        posttrain.evaluate("tiny", prompts=rows, max_new_tokens=4, **options)


# Each leaves something out: the user's message, the system's, and which of them spoke.
DROPS = {
    "user": "{% for m in messages %}<|{{ m['role'] }}|><|end|>{% endfor %}<|assistant|>",
    "system": "<|user|>{{ messages[-1]['content'] }}<|end|><|assistant|>",
}


@pytest.fixture(params=DROPS)
def dropping(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The role whose message a template leaves out, and a recipe that meets it."""
    policy = load_policy("tiny", options=CHAT)
    policy.tokenizer.chat_template = DROPS[request.param]
    save_policy(policy, tmp_path / "model")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    rows = [{"messages": [*messages, {"role": "assistant", "content": "2"}]}]
    sft = {"data": lines(tmp_path / "rows.jsonl", rows)}
    values = given(tmp_path, task=chats(tmp_path), sft=sft, eval=EVAL)
    return request.param, {**values, "model": {"name": str(tmp_path / "model")}}


def test_a_template_that_drops_a_message_stops_check_and_run_with_what_it_wrote(
    dropping: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    role, values = dropping
    says = rf"chat_template\.jinja\) leaves out the {role}'s message: of a chat of .* it writes '<"
    with pytest.raises(ValueError, match=says):
        small_run(values)
    assert not (tmp_path / "run" / "sft").exists()
    [line] = [line for line in check_recipe(values, fast=True).of("fail") if line.name == "chat"]
    assert f"leaves out the {role}'s message" in line.text
    assert "fix the template" in line.fix


LEAKS = {
    "other white space, another system message": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "What  is\n1+1? "},
    ],
    "the first turn of two": [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ],
    "the last turn of two": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is 1+1?"},
    ],
    "letters of another width": [{"role": "user", "content": "What is １+１?"}],
}


@pytest.mark.parametrize("messages", LEAKS.values(), ids=LEAKS)
def test_a_held_out_question_among_demonstrations_is_refused(
    messages: list[dict[str, str]], tmp_path: Path
) -> None:
    rows = [{"messages": [*messages, {"role": "assistant", "content": "2"}]}]
    sft = {"data": lines(tmp_path / "rows.jsonl", rows)}
    values = given(tmp_path, task=chats(tmp_path), sft=sft, eval=EVAL)
    says = r"demonstrations of test: 1 of 1 held-out problems are in sft\.data .*1\+1.*; remove"
    with pytest.raises(ValueError, match=says):
        small_run(values)
    assert not (tmp_path / "run" / "sft").exists()


def test_a_run_that_asks_no_test_prompt_is_cautioned_of_one(tmp_path: Path) -> None:
    """As the check warns of it."""
    rows = [{"prompt": "What is 1+1?", "completion": "2"}]
    sft = {"data": lines(tmp_path / "rows.jsonl", rows), "evaluate_every": 0}
    values = given(tmp_path, task=chats(tmp_path), sft=sft)
    del values["eval"]
    said = " ".join(small_run(values)[1].split())
    assert "caution: 1 of 1 held-out problems are in sft.data (the first: 'What is 1+1?')" in said
    [line] = [x for x in check_recipe(values).of("warn") if x.name == "demonstrations of test"]
    assert f"caution: {line.text}; {line.fix}" in said


def test_one_among_preferences_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Setup] = []
    ends = Setup.close
    monkeypatch.setattr(Setup, "close", lambda setup: (closed.append(setup), ends(setup)))
    rows = [{"prompt": f"What is 1+{n}?", "chosen": str(1 + n), "rejected": "?"} for n in (1, 5, 6)]
    reward = {"data": lines(tmp_path / "pairs.jsonl", rows)}
    values = given(tmp_path, task=chats(tmp_path), reward=reward, eval=EVAL)
    values["run"]["stages"] = ["reward", "eval"]
    with pytest.raises(ValueError, match="preferences of test: 1 of 1 held-out problems are in"):
        small_run(values)
    assert not (tmp_path / "run" / "reward").exists()
    assert len(closed) == 1  # no worker is left behind
    [line] = [x for x in check_recipe(values, fast=True).lines if x.name == "preferences of test"]
    assert line.state == "fail"


def test_prompts_that_the_template_writes_alike_are_the_same(tmp_path: Path) -> None:
    """This template cuts what follows a bar: then two texts are one question."""
    policy = load_policy("tiny", options=CHAT)
    cut = "message['content'].split('//')[0]"
    policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace(
        "message['content']", cut
    )
    save_policy(policy, tmp_path / "model")
    rows = [{"prompt": "What is 1+1?//in words", "completion": "two"}]
    task = chats(tmp_path, test="What is 1+1?//as a number")
    sft = {"data": lines(tmp_path / "rows.jsonl", rows)}
    values = given(tmp_path, task=task, sft=sft, eval=EVAL)
    found = resolve(recipe_from_dict({**values, "model": {"name": str(tmp_path / "model")}}))
    made = make_setup(found, make_policy(found, found.model.name, device="cpu"), device="cpu")
    assert made.task is not None
    test, shown = made.task.prompts("test"), learned(found, "sft")
    assert among(test, shown) == []
    assert len(among(test, shown, template=made.template)) == 1
    made.close()


def test_characters_are_lost_in_three_ways() -> None:
    tokenizer = build_tokenizer()
    assert lost_characters(tokenizer, set("abc 1\n")) == {}
    assert lost_characters(tokenizer, {"é", "a"}) == {"é": "<|unknown|>"}
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert lost_characters(tokenizer, {"A", "b"}) == {"A": "a"}
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("b", "")
    assert lost_characters(tokenizer, {"a", "b"}) == {"b": ""}
