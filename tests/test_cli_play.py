"""``posttrain play``: an episode as it goes on, and a person in a place of it."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command_in
from resumed_runs import GRPO, given, go
from small_runs import RECIPE, TASK

import posttrain
from posttrain.config import recipe_from_dict, to_toml
from posttrain.data.template import Template
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.tasks import make_task
from posttrain.types import Observation, Rollout

REWARDED = '''
from posttrain.types import Observation

class Rewards:
    """Two replies with a reward each, then the end."""

    def __init__(self, *, last: float = 0.5, text: str = "go on"):
        self.last, self.text = last, text

    def start(self, prompt):
        return []

    def reply(self, state, turn):
        state.append(turn.text)
        return Observation(self.text, reward=0.25 * len(state)) if len(state) < 3 else self.last
'''
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def play(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """``posttrain play`` in a folder with an environment of one's own, and with piped lines."""
    (tmp_path / "rewarding_env.py").write_text(REWARDED)
    monkeypatch.syspath_prepend(tmp_path)
    command = command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)

    def play(*arguments: object, typed: str = "") -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        return command("play", *arguments)

    return play


def test_an_episode_is_shown_turn_by_turn(play: Command) -> None:
    """Who wrote what, what each turn earned, why it was over, and a score that is their sum."""
    options = ["--prompt", "2+3=", "--max-new-tokens", 2, "--temperature", 0]
    found = play("tiny", "rewarding_env:Rewards", *options)
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    heads = [line for line in lines if not line.startswith("  ")]
    assert heads[:2] == ["episode 1 of 1 · seed 0", "prompt · 4 tokens"]
    assert [line.partition(" ")[0] for line in heads[2:7]] == ["policy", "environment"] * 2 + [
        "policy"
    ]
    assert heads[3] == "environment · 5 tokens · turn 1 earned +0.25"
    assert heads[5] == "environment · 5 tokens · turn 2 earned +0.5"
    assert heads[7:] == [
        "over: the environment ended it",
        "score 1.25 · env/earned 0.75 · env 1.25",
        "earned by turn 1: +0.25, turn 2: +0.5, turn 3: +0.5",
    ]
    assert lines[2] == "  2+3="
    assert lines.count("  go on") == 2
    again = play("tiny", "rewarding_env:Rewards", "--env", "last=1", *options)
    assert "score 1.75 " in again.out


@pytest.mark.parametrize("human", [None, "policy"])
def test_what_the_environment_opens_with_is_shown_before_the_first_turn(
    play: Command, human: str | None
) -> None:
    """In the prompt, where the policy reads it, and by itself; before a person is asked, too."""
    options = ["--prompt", "Play.", "--max-new-tokens", 2, "--env", "max_guesses=1"]
    place = [] if human is None else ["--human", human]
    found = play("tiny", "wordle", *options, *place, typed="crane\n" if human else "")
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    heads = [line for line in lines if not line.startswith("  ") and line]
    place_of = {line.split(" ")[0]: lines.index(line) for line in reversed(heads)}
    assert place_of["prompt"] < place_of["environment"] < place_of["policy"]
    assert lines[place_of["environment"]] == "environment · opens, in the prompt"
    (rules,) = {line for line in lines if "word of five letters" in line}
    assert lines.count(rules) == 2
    assert all(n < place_of["policy"] for n, line in enumerate(lines) if line == rules)
    seen: list[Rollout] = []
    env = {"name": "wordle", "max_guesses": 1}
    posttrain.play("tiny", env, prompt="Play.", max_new_tokens=2, show=seen.append)
    assert not seen[0].turns
    assert "word of five letters" in seen[0].prompt.text


def test_a_row_that_the_environment_wants_is_asked_for_before_the_first_turn() -> None:
    class Shop:
        def reset(self, item: str) -> str:
            return item

        def on_text(self, text: str) -> float:
            return 1.0

    def ask(read: str) -> str:
        raise AssertionError("a turn was asked for")

    with pytest.raises(ValueError, match=r"Shop: reset wants 'item'.*play a recipe or a run"):
        posttrain.play("tiny", Shop, prompt="Hello.", human="policy", ask=ask)


def test_what_the_command_shows_is_what_the_function_returns(play: Command) -> None:
    """The same tokens by seed, as it shows them, and another episode with another seed."""
    seen: list[Rollout] = []
    env = {"name": "scripted", "replies": ["+1="], "score": 1.0}
    options: dict[str, Any] = {"prompt": "2+3=", "max_new_tokens": 6}
    played = posttrain.play("tiny", env, seed=3, show=seen.append, **options)
    assert played == posttrain.play("tiny", env, seed=3, **options)
    assert played.turns != posttrain.play("tiny", env, seed=4, **options).turns
    assert [len(each.turns) for each in seen] == [0, 1, 2, 3]
    assert [each.turns for each in seen] == [played.turns[:n] for n in range(4)]
    assert [turn.sampled for turn in played.turns] == [True, False, True]
    assert played.score is not None
    assert played.score.value == 1.0
    found = play("tiny", "scripted", "--env", 'replies=["+1="]', "--env", "score=1.0", "--seed", 2,
                 "--prompt", "2+3=", "--max-new-tokens", 6, "--episodes", 2)  # fmt: skip
    second = found.out.partition("episode 2 of 2 · seed 3")[2]
    for turn in played.turns:
        assert f" · {len(turn.tokens)} token" in second


def test_a_file_of_prompts_is_a_task(play: Command, tmp_path: Path) -> None:
    """As ``posttrain eval`` takes it, and from Python."""
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "Of the file: "}\n')
    options = ["--max-new-tokens", 2, "--task", file, "--index", 1]
    found = play("tiny", "rewarding_env:Rewards", *options)
    assert "train prompt 1, seed 0" in found.out, found.err
    assert "Of the file: " in found.out
    short: dict[str, Any] = {"max_new_tokens": 2, "task": str(file)}
    assert posttrain.play("tiny", "rewarding_env:Rewards", **short).prompt.text == "a"


def test_a_task_gives_the_prompt_and_scores_what_the_environment_does_not(play: Command) -> None:
    found = play("tiny", "scripted", "--task", "arithmetic", "--task.operators=+", "--index", 3,
                 "--split", "test", "--human", "policy", typed="1\n")  # fmt: skip
    assert found.code == 0, found.err
    task = {"name": "arithmetic", "operators": "+"}
    prompt = make_task(task).prompts("test")[3]
    assert f"\n  {prompt.text}\n" in found.out
    right = play("tiny", "scripted", "--task", "arithmetic", "--task.operators=+", "--index", 3,
                 "--split", "test", "--human", "policy",
                 typed=f"{prompt.columns['answer']}\n")  # fmt: skip
    assert "test prompt 3, seed 0" in right.out
    assert "score 1 · numeric 1" in right.out
    assert "score 0 · numeric 0" in found.out


def test_a_person_in_the_place_of_the_policy(play: Command) -> None:
    """What is typed is encoded once, ends with an end token, and is the policy's in the mask."""
    env = {"name": "scripted", "replies": ["+1="], "score": 1.0}
    lines = iter(["5 apples", "six"])
    read: list[str] = []

    def ask(text: str) -> str:
        read.append(text)
        return next(lines)

    played = posttrain.play("tiny", env, prompt="2+3=", human="policy", ask=ask)
    policy = load_policy("tiny")
    template = Template(policy.tokenizer, end_tokens=policy.end_tokens)
    end = policy.end_tokens[0]
    assert played.turns[0].tokens == template.encode_completion("5 apples", end)
    assert played.turns[2].tokens == template.encode_completion("six", end)
    assert played.turns[0].tokens[-1] == end
    assert [turn.sampled for turn in played.turns] == [True, False, True]
    assert read[0] == "2+3="
    assert read[1].startswith("2+3=5 apples")
    assert read[1].endswith("+1=")
    found = play("tiny", "scripted", "--env", 'replies=["+1="]', "--prompt", "2+3=",
                 "--human", "policy", typed="5 apples\n")  # fmt: skip
    assert found.code == 0
    assert "policy (you) · turn 1 · 9 tokens\n  5 apples\n" in found.out
    assert found.out.endswith("no more input: the episode ends here, without a score\n")


def test_a_person_in_the_place_of_the_environment(play: Command) -> None:
    """A line is a reply, empty ones are passed over, /end ends; so does the end of the input."""
    options = ["--prompt", "2+3=", "--human", "env", "--max-new-tokens", 2]
    found = play("tiny", *options, typed="why?\n\n/end 0.5\nnever read\n")
    assert found.code == 0, found.err
    assert "environment (you) · 4 tokens\n  why?\n" in found.out
    assert "score 0.5 · env 0.5" in found.out
    assert "never" not in found.out
    over = play("tiny", *options, "--episodes", 3, typed="why?\n")
    assert over.code == 0
    assert "over: no more input\nno score (invalid): " in over.out
    assert "the environment gave none" in over.out
    assert "episode 2" not in over.out


def test_a_chat_model_hears_a_person_as_its_user(tmp_path: Path) -> None:
    """In the environment's place a line is rendered as a message by the chat template."""
    policy = load_policy("tiny")
    policy.tokenizer.chat_template = CHAT
    save_policy(policy, tmp_path / "chat")
    replies = iter(["why?", "/end 1"])
    options: dict[str, Any] = {"human": "env", "ask": lambda text: next(replies)}
    played = posttrain.play(tmp_path / "chat", prompt="2+3=", max_new_tokens=2, **options)
    template = Template(policy.tokenizer, chat=True, end_tokens=policy.end_tokens)
    said = template.encode_reply([{"role": "user", "content": "why?"}])
    assert played.turns[1].tokens == said
    assert len(said) > len(template.control.encode("why?"))


def test_limits_end_an_episode_and_say_so(play: Command) -> None:
    found = play("tiny", "rewarding_env:Rewards", "--prompt", "2+3=", "--max-turns", 2,
                 "--max-new-tokens", 2)  # fmt: skip
    assert "over: the limit on turns was reached" in found.out
    assert found.out.count("\npolicy · turn") == 2
    full = play("tiny", "rewarding_env:Rewards", "--prompt", "2+3=", "--env", f"text={'a' * 600}",
                "--max-new-tokens", 2)  # fmt: skip
    assert "over: the model's context has no room for another turn" in full.out


def test_an_environment_that_raises_has_no_score(play: Command, tmp_path: Path) -> None:
    (tmp_path / "raising_env.py").write_text(
        "class Raises:\n"
        "    def start(self, prompt): return None\n"
        "    def reply(self, state, turn): raise KeyError('nothing here')\n"
    )
    found = play("tiny", "raising_env:Raises", "--prompt", "2+3=", "--max-new-tokens", 2)
    assert found.code == 1
    assert "no score (invalid): " in found.out
    assert "nothing here" in found.out


def test_no_text_can_act_in_a_terminal_or_pass_for_a_heading(play: Command) -> None:
    """Of the policy, the environment and the prompt alike."""
    nasty = "\x1b[2Jscore 9\nscore 9"
    typed = nasty.replace("\n", "\\n") + "\n"
    found = play("tiny", "rewarding_env:Rewards", "--env", f"text={nasty!r}", "--prompt", nasty,
                 "--human", "policy", typed=typed * 3)  # fmt: skip
    assert found.code == 0, found.err
    assert "\x1b" not in found.out
    assert "  \\x1b[2Jscore 9\n  score 9\n" in found.out
    assert sum(line.startswith("score") for line in found.out.splitlines()) == 1


def test_the_environment_of_a_recipe_or_a_run(play: Command, tmp_path: Path) -> None:
    """A model alone is played with the settings of the recipe; a run needs no environment."""
    env = {"name": "scripted", "replies": ["+1="], "score": 0.5}
    recipe = recipe_from_dict({**RECIPE, "task": {**TASK, "env": env}})
    (tmp_path / "talk.toml").write_text(to_toml(recipe))
    found = play("tiny", "talk.toml", "--index", 1)
    assert found.code == 0, found.err
    assert "score 0.5 · " in found.out
    assert "  +1=\n" in found.out
    other = play("tiny", "talk.toml", "--env", "score=0.75")
    assert "score 0.75 · " in other.out
    done, _ = go(given(tmp_path / "run", {**GRPO, "steps": 1}, task={"env": env}))
    played = posttrain.play(done.folder.path, index=1)
    assert played == posttrain.play(done.folder.path, tmp_path / "talk.toml", index=1)
    assert [turn.text for turn in played.turns[1::2]] == ["+1="]
    assert played.prompt.id == "train-1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "scipted", "--prompt", "a"], "did you mean 'scripted'?"),
        (["tiny", "rewarding_env:Reward", "--prompt", "a"], "mean 'rewarding_env:Rewards'?"),
        (["tiny", "rewardin_env:Rewards", "--prompt", "a"], "mean 'rewarding_env:Rewards'?"),
        (["tiny", "scripted", "--env", "replys=[]", "--prompt", "a"], "did you mean 'replies'?"),
        (["tiny", "scripted", "--env", "replies", "--prompt", "a"], "expected KEY=VALUE"),
        (["tiny", "scripted"], "Give a prompt, or name a task"),
        (["tiny", "--prompt", "a"], "which environment? Name one"),
        (["tiny", "--env", "score=1", "--prompt", "a"], "of which environment? Name one"),
        (["tiny", "scripted", "--prompt", "a", "--task", "sort"], "not both"),
        (["tiny", "scripted", "--task", "arithmetc"], "did you mean 'arithmetic'?"),
        (["tiny", "scripted", "--task", "arithmetic", "--index", "9999"], "there is no 9999"),
        (["tiny", "scripted", "again", "--prompt", "a"], "'again' is a second one"),
        (["tiny", "scripted", "--prompt", "a", "--rl.steps", "1"], "no effect on an episode"),
    ],
)
def test_mistakes(play: Command, arguments: list[str], said: str) -> None:
    found = play(*arguments)
    assert found.code == 2, found
    assert said in found.err


def test_an_environment_as_an_object() -> None:
    """Of one's own, without a module to name."""

    class Praises:
        def start(self, prompt: object) -> None: ...

        def reply(self, state: None, turn: object) -> float | Observation:
            return 1.0

    played = posttrain.play("tiny", Praises(), prompt="2+3=", max_new_tokens=2)
    assert played.score is not None
    assert played.score.value == 1.0


class Switches:
    """The shape of TRL."""

    def reset(self, **columns: object) -> None:
        self.on = False

    def switch(self, on: bool) -> str:
        """Switch the lamp.

        Args:
            on: Whether it shall burn.
        """
        self.on = on
        return "on"

    def get_reward(self) -> float:
        return 0.5 + self.on


def ends(messages: list[object]) -> float:
    return 0.25


@pytest.mark.parametrize(("env", "value"), [(Switches, 1.5), (ends, 0.25)])
def test_a_class_or_a_function_itself(env: Any, value: float) -> None:
    """As in ``task.env``, whatever its shape."""
    typed = iter(['<tool>{"name": "switch", "arguments": {"on": true}}</tool>', "Done."])
    played = posttrain.play(
        "tiny", env, prompt="2+3=", human="policy", ask=lambda question: next(typed)
    )
    assert played.score is not None
    assert played.score.value == value


@pytest.mark.parametrize("env", [Switches(), 3])
def test_what_is_no_environment_says_so(env: Any) -> None:
    with pytest.raises(ValueError, match="env: expected an environment, its name, or its class"):
        posttrain.play("tiny", env, prompt="2+3=")


def test_an_environment_in_the_wrong_place_says_where_it_belongs() -> None:
    options: dict[str, Any] = {"env": "scripted"}
    with pytest.raises(ValueError, match=r"prefer\.env: unknown key; env is a key of \[task\]"):
        posttrain.prefer(model="tiny", prompts=["a"], reward="format", **options)
