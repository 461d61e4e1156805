"""Environments of verifiers, as they come: its loop, its messages, its rubric; tokens are ours."""

import sys
from pathlib import Path
from typing import Any

import pytest
from played_episodes import asked, play, replies, score, trained

from posttrain.envs import make_env
from posttrain.envs.adapters.verifiers_env import load
from posttrain.types import Observation, Prompt, Turn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

TOOLS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def breaks(completion):
    if "boom" in completion[-1]["content"]:
        raise RuntimeError("no grader today")
    return 0.0

def load_environment(extra: float = 0.0):
    rows = [{"question": "2+3?", "answer": "5"}, {"question": "4+4?", "answer": "8"}]
    rubric = vf.Rubric(funcs=[right, breaks], weights=[1.0, extra])
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list([{"question": "1+1?", "answer": "2"}]),
        tools=[add], rubric=rubric, max_turns=4,
    )
'''

OTHERS = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "so?", "answer": "x"}])
CLEANED = []

class Rewrites(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        turns = len(state["trajectory"])
        return [vf.UserMessage(content=f"forget it {turns}" if turns else "so?")]
    async def env_response(self, messages, state): ...

class Rewards(vf.MultiTurnEnv):
    """Each turn earns its length; the rubric adds them up."""
    async def setup_state(self, state):
        state["prompt"][-1].content += " Go!"
    async def add_trajectory_step(self, state, trajectory_step):
        trajectory_step["reward"] = float(len(trajectory_step["completion"][-1].content))
        await super().add_trajectory_step(state, trajectory_step)
    async def env_response(self, messages, state):
        if messages[-1].content == "raise":
            raise ZeroDivisionError("the environment's own")
        if messages[-1].content == "error":
            raise vf.ToolError("no tool")
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]
    @vf.cleanup
    async def cleaned(self, state):
        CLEANED.append(state["stop_condition"] if "stop_condition" in state else None)

def rewrites():
    return Rewrites(dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))

async def total(state):
    return sum(step["reward"] for step in state["trajectory"])

def rewards():
    return Rewards(dataset=ROWS, max_turns=3, rubric=vf.Rubric(funcs=[total]))

def compares():
    def longest(completions) -> list[float]: ...
    return Rewards(dataset=ROWS, max_turns=3, rubric=vf.Rubric(funcs=[longest]))
'''

WORDLE = """
import verifiers as vf

def load_environment(examples: int = 3):
    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    def solved(parser, completion, answer):
        return float(parser.parse_answer(completion) == f"[{answer}]")
    functions = [solved, parser.get_format_reward_func()]
    rubric = vf.Rubric(funcs=functions, weights=[1.0, 0.25], parser=parser)
    return vf.TextArenaEnv(
        game="Wordle-v0", parser=parser, rubric=rubric, num_train_examples=examples,
        num_eval_examples=1, feedback_fn=lambda seen: seen.split("Feedback:")[-1],
    )
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that load environments; each test loads its own."""
    pytest.importorskip("verifiers", reason="verifiers is not installed: make env-adapters")
    for name, text in (("adding", TOOLS), ("others", OTHERS), ("a_wordle", WORDLE)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    load.cache_clear()
    return tmp_path


def verifiers(environment: str, *, chat: bool = True, **settings: Any) -> Any:
    spec = {"name": "verifiers", "environment": environment, "settings": settings}
    return make_env(spec, chat=chat, tool_format="hermes")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data that nltk would download: here four words, and a tagger for which all are nouns."""
    pytest.importorskip("textarena", reason="textarena is not installed: make env-adapters")
    corpus = tmp_path / "nltk_data" / "corpora" / "words"
    tagger = tmp_path / "nltk_data" / "taggers" / "averaged_perceptron_tagger_eng"
    for folder in (corpus, tagger):
        folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("crane\nslate\napple\nhouse\n", encoding="utf-8")
    for name, text in (("weights", "{}"), ("tagdict", "{}"), ("classes", '["NN"]')):
        (tagger / f"{tagger.name}.{name}.json").write_text(text, encoding="utf-8")
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    monkeypatch.setattr(nltk, "download", lambda *given, **named: True)


@pytest.mark.usefixtures("modules", "words")
def test_wordle_of_the_package_is_played_unchanged() -> None:
    """verifiers' TextArenaEnv: several turns, feedback of the game, the score of its rubric."""
    env = verifiers("a-wordle")
    guesses = [
        ["<guess>[crane]</guess>", "<guess>[house]</guess>"],
        ["<guess>[apple]</guess>", "crane?", "well?", "no"],
    ]
    won, lost = play(env, [asked("Wordle!", answer="house")], says=guesses)
    assert replies(won) == ["\nC R A N E\nX X X X G\nYou have 5 guesses left."]
    assert score(won).ok
    assert score(won).value == 1.25
    assert score(won).parts["env/solved"] == 1.0
    assert score(won).parts["env/num_turns"] == 2.0
    # What is no guess is an invalid move, and the second ends the game.
    assert "A P P L E" in replies(lost)[0]
    assert score(lost).ok
    assert score(lost).parts["env/solved"] == 0.0


@pytest.mark.usefixtures("modules")
def test_reasoning_gym_of_the_package_is_scored_by_its_own_rubric() -> None:
    """verifiers' ReasoningGymEnv, with nothing of ours but its name: dataset and rubric are its."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make env-adapters")
    name = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
    settings = {"gym": "chain_sum", "num_train_examples": 2, "num_eval_examples": 1}
    env = verifiers(name, **settings)
    gym = env._env
    gold = gym.rg_dataset[1]["answer"]
    prompt = asked(gym.rg_dataset[1]["question"], answer="1")
    said = [[f"<answer>{gold}</answer>"], ["<answer>no</answer>"]]
    right, wrong = play(env, [prompt], says=said)
    assert score(right).value == 1.0
    assert score(wrong).value < 0.1
    assert len(right.turns) == 1


@pytest.mark.usefixtures("modules")
def test_tools_are_called_and_what_is_malformed_is_answered() -> None:
    env = verifiers("adding")
    [tool] = env.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    calls = [
        [call, "5"],
        ["<tool_call>add(2, 3)</tool_call>", call.replace("add", "plus"), "6"],
    ]
    right, wrong = play(env, [asked("2+3?", answer="5")], says=calls)
    assert replies(right) == ["5"]
    assert (score(right).value, score(right).parts["env/add_calls"]) == (1.0, 1.0)
    assert "Expecting value" in replies(wrong)[0]
    assert "plus" in replies(wrong)[1]
    assert (score(wrong).ok, score(wrong).value) == (True, 0.0)
    assert score(wrong).parts["env/total_tool_calls"] == 2.0


@pytest.mark.usefixtures("modules")
def test_a_reward_function_that_raises_is_broken_and_not_wrong() -> None:
    """verifiers logs it and gives 0."""
    broken, fine = play(verifiers("adding"), [asked("2+3?", answer="5")], says=[["boom"], ["5"]])
    assert score(broken).state == "invalid"
    assert "no grader today" in score(broken).reason
    assert score(fine).value == 1.0


@pytest.mark.usefixtures("modules")
def test_rewards_of_turns_openings_and_cleaning_up() -> None:
    env = verifiers("others:rewards")
    state = env.start(asked("so?"))
    assert env.opening(state) == " Go!"
    said = [Turn(tokens=(7,), text=text, logprobs=(-1.0,)) for text in ("abc", "de", "f")]
    assert env.reply(state, said[0]) == Observation(
        [{"role": "user", "content": "turn 1"}], reward=3.0
    )
    assert env.reply(state, said[1]).reward == 2.0
    last = env.reply(state, said[2])
    assert (last.value, last.parts["total"]) == (1.0, 6.0)  # 6 in all, of which 5 were given
    env.close(state)
    left = env.start(asked("so?"))
    env.close(left)
    assert left.task.done()
    assert len(sys.modules["others"].CLEANED) == 2


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("said", "reason"),
    [("raise", "the environment's own"), ("error", "ToolError('no tool')")],
)
def test_an_environment_that_fails_is_invalid(said: str, reason: str) -> None:
    failed, fine = play(verifiers("others:rewards"), [asked("so?")], says=[[said], ["a", "b", "c"]])
    assert score(failed).state == "invalid"
    assert reason in score(failed).reason
    assert score(fine).value == 3.0


@pytest.mark.usefixtures("modules")
def test_what_cannot_be_one_sequence_of_tokens_or_one_score_is_refused() -> None:
    [rollout] = play(verifiers("others:rewrites"), [asked("so?")], says=[["a", "b"]])
    assert score(rollout).state == "invalid"
    assert "rewrites messages that the policy has read" in score(rollout).reason
    with pytest.raises(ValueError, match="over a group of rollouts"):
        verifiers("others:compares")
    with pytest.raises(ValueError, match="no-such-environment"):
        verifiers("no-such-environment")


@pytest.mark.usefixtures("modules")
def test_a_prompt_that_is_text_is_answered_with_text() -> None:
    prompt = Prompt(id="0", text="so?", tokens=(115, 111, 63))
    [rollout] = play(verifiers("others:rewards", chat=False), [prompt], says=[["a", "b", "c"]])
    assert replies(rollout) == ["\nturn 1\n", "\nturn 2\n"]


def test_a_model_is_trained_by_the_command_line(modules: Path) -> None:
    """Each turn earns its length: that is the score of every rollout."""
    rows = trained(modules, {"name": "verifiers", "environment": "others:rewards"})
    assert len(rows) == 2
    for row in rows:
        assert row["sampler_logprobs"].count(None) == 2 * len("\nturn 1\n")
        assert row["reward"] > 0


def test_without_verifiers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    load.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'posttrain\[verifiers\]'"):
        verifiers("adding")
