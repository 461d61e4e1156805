"""The scorer: weighted sums, wrong apart from broken, and errors in the first second."""

import asyncio
import functools
import json
import math
import signal
import sys

import numpy as np
import pytest
import torch

from posttrain.registry import look_up
from posttrain.rewards import REWARDS
from posttrain.rewards.scorer import FROM_ROLLOUT, RewardScorer
from posttrain.types import Prompt, Rollout, Score, Turn

PROMPT = Prompt(id="train-7", text="2+3=", columns={"answer": "5", "hint": "add"})


def rollout(text, *, prompt=PROMPT, num_tokens=3, stop_reason="stop"):
    completion = Turn(
        tokens=(1,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        text=text,
        stop_reason=stop_reason,
        version=0,
    )
    return Rollout(prompt=prompt, turns=(completion,), group=0)


def score(function, text="5"):
    return RewardScorer({function: 1.0}).score([rollout(text)])[0]


def test_weighted_sum_and_unweighted_parts():
    def brevity(num_tokens, *, limit: int = 10):
        return 1 - num_tokens / limit

    scorer = RewardScorer(
        {"numeric": {"weight": 2.0, "extract": "tag"}, "format": 0.5, brevity: {"limit": 4}}
    )
    right, wrong = scorer.score([rollout("<answer>5</answer>"), rollout("5", num_tokens=2)])
    assert right == Score(
        value=2.0 * 1 + 0.5 * 0 + 1.0 * 0.25, parts={"numeric": 1.0, "format": 0.0, "brevity": 0.25}
    )
    assert wrong == Score(value=0.5, parts={"numeric": 0.0, "format": 0.0, "brevity": 0.5})


def test_everything_a_reward_may_ask_for():
    seen = {}

    def spy(prompt, completion, num_tokens, stop_reason, answer, hint, rare="default"):
        seen.update(locals())
        return 1.0

    assert RewardScorer({spy: 1.0}).score([rollout("four", stop_reason="length")])[0].ok
    del seen["seen"]
    assert seen == {
        "prompt": "2+3=",
        "completion": "four",
        "num_tokens": 3,
        "stop_reason": "length",
        "answer": "5",
        "hint": "add",
        "rare": "default",
    }
    assert set(FROM_ROLLOUT) == {"prompt", "completion", "num_tokens", "stop_reason"}


def test_the_prompt_of_a_chat_is_its_last_message():
    chat = Prompt(
        id="a",
        text="",
        messages=({"role": "system", "content": "S"}, {"role": "user", "content": "U"}),
    )
    result = RewardScorer({(lambda prompt: prompt == "U"): 1.0}).score([rollout("", prompt=chat)])
    assert result[0].value == 1.0


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (True, 1.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(2.0), 2.0),
    ],
)
def test_kinds_of_numbers(returned, value):
    result = score(lambda completion: returned)
    assert (result.value, result.state, type(result.value)) == (value, "ok", float)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned None, not a number; return a float"),
        ("1.0", "returned a str, not a number"),
        ([1.0], "returned a list"),
        (1j, "returned a complex"),
        (math.nan, "returned nan, not a finite number"),
        (math.inf, "returned inf"),
        (-math.inf, "returned -inf"),
        (1e160, "returned 1e+160: larger than 1e+30; scale the reward"),
        (-2e30, "returned -2e+30: larger than 1e+30"),
        (10**400, "returned int too large"),
        (torch.zeros(2), "returned a Tensor with 2 elements"),
        (Score(value=math.nan), "returned nan"),
        (Score(value=None), "returned None"),
    ],
)
def test_what_is_no_reward_is_invalid_and_not_zero(returned, reason):
    result = score(lambda completion: returned)
    assert (result.value, result.state, result.ok) == (0.0, "invalid", False)
    assert reason in result.reason
    assert "'<lambda>'" in result.reason


def test_a_reward_that_raises_is_invalid_with_its_line():
    def fragile(completion):
        return float(completion)

    line = fragile.__code__.co_firstlineno + 1
    good, bad = RewardScorer({fragile: 1.0}).score([rollout("0"), rollout("five")])
    assert good == Score(value=0.0, parts={"fragile": 0.0})
    assert bad.state == "invalid"
    assert bad.reason == (
        "reward 'fragile' raised ValueError: could not convert string to float: 'five' "
        f"(test_scorer.py:{line})"
    )


def test_a_reward_that_takes_text_for_messages_is_told():
    def chatty(completions):
        return [float(completion[0]["content"]) for completion in completions]

    assert score(chatty, "5").reason.endswith("; where your prompts are text, completions are text")


def test_the_line_is_in_the_rewards_own_file_even_when_a_library_raises():
    def fragile(completion):
        return json.loads(completion)["score"]

    assert "raised json.decoder.JSONDecodeError" in score(fragile, "{").reason
    assert score(fragile, "{").reason.endswith(
        f"(test_scorer.py:{fragile.__code__.co_firstlineno + 1})"
    )


@pytest.mark.parametrize(
    "error",
    [
        RecursionError(),
        MemoryError(),
        SystemExit(0),
        StopIteration(),
        AssertionError(),
        BrokenPipeError(32, "Broken pipe"),
        GeneratorExit(),
        asyncio.CancelledError(),
        pytest.fail.Exception("an exception that is no Exception"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["single", "batched", "async", "scorer"])
def test_errors_of_every_kind_are_invalid(error, kind):
    def raises(completion):
        raise error

    async def awaited(completion):
        raise error

    class Scorer:
        def score(self, rollouts):
            raise error

    raises.batched = kind == "batched"
    result = score({"async": awaited, "scorer": Scorer()}.get(kind, raises))
    assert result.state == "invalid"
    name = "RuntimeError" if (kind, type(error)) == ("async", StopIteration) else None
    assert (name or type(error).__name__) in result.reason


def test_an_error_that_cannot_be_printed_is_invalid():
    class RudeError(Exception):
        def __str__(self):
            raise ValueError("no")

    def fragile(completion):
        raise RudeError

    assert "RudeError" in score(fragile).reason


def test_a_long_message_is_cut():
    def fragile(completion):
        raise ValueError("x" * 100_000)

    assert len(score(fragile).reason) < 700


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_passes_through(ignored):
    """Also where Ctrl-C is ignored, as in a job that a shell has started in the background."""

    def interrupted(completion):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            score(interrupted)
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_broken_reward_breaks_the_sum_and_later_ones_do_not_run():
    def broken(completion):
        raise RuntimeError("out of order")

    def never(completion):
        raise KeyboardInterrupt

    result = RewardScorer({"exact": 1.0, broken: 1.0, never: 1.0}).score([rollout("5")])[0]
    assert (result.state, result.parts) == ("invalid", {"exact": 1.0})


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(1e10, "is 1e+35: larger than 1e+30; scale the reward"), (1e300, "is inf, not a finite")],
)
def test_a_sum_that_is_too_large_is_invalid(weight, reason):
    result = RewardScorer({(lambda completion: 1e25): weight}).score([rollout("5")])[0]
    assert (result.value, result.state) == (0.0, "invalid")
    assert reason in result.reason


def test_the_largest_score_is_none_too_large():
    assert score(lambda completion: -1e30) == Score(value=-1e30, parts={"<lambda>": -1e30})


@pytest.mark.parametrize("returned", [[0.5], [0.5] * 17, [], 0.5])
def test_a_batched_reward_with_a_wrong_number_of_scores_is_broken_and_not_asked_again(returned):
    calls = []

    def batched(completion):
        calls.append(len(completion))
        return returned

    batched.batched = True
    scores = RewardScorer({batched: 1.0}).score([rollout("5")] * 16)
    what = f"list of {len(returned)}" if isinstance(returned, list) else "float"
    assert {each.state for each in scores} == {"invalid"}
    assert {each.reason for each in scores} == {
        f"reward 'batched' returned {what}; expected a list of 16, one score for each completion"
    }
    assert calls == [16]


def test_a_reward_may_return_a_score():
    graded = score(lambda completion: Score(value=0.5, parts={"style": 0.2}))
    assert graded == Score(value=0.5, parts={"<lambda>": 0.5, "<lambda>/style": 0.2})
    late = score(lambda completion: Score(value=1.0, state="timeout", reason="no verdict in 5 s"))
    assert (late.value, late.state) == (0.0, "timeout")
    assert late.reason == "reward '<lambda>': no verdict in 5 s"


def test_a_weight_of_zero_only_watches():
    assert RewardScorer({"exact": 0, "numeric": 1}).score_text(PROMPT, "5.0") == Score(
        value=1.0, parts={"exact": 0.0, "numeric": 1.0}
    )


def test_a_missing_column_is_an_error_before_the_run_and_invalid_in_it():
    def wants_more(completion, anser, bonus=0):
        return 1.0

    scorer = RewardScorer({wants_more: 1.0})
    with pytest.raises(ValueError, match=r"'anser', which prompt 'train-7' .* mean 'answer'\?"):
        scorer.check_columns(PROMPT)
    assert "no column 'anser'" in scorer.score([rollout("5")])[0].reason
    RewardScorer({"exact": 1.0}).check_columns(PROMPT)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "none given; name at least one"),
        ({"exactt": 1.0}, "did you mean 'exact'"),
        ({"exact": "1"}, "the weight must be a finite number, got '1'"),
        ({"exact": True}, "the weight must be a finite number"),
        ({"exact": math.nan}, "the weight must be a finite number"),
        ({"exact": {"weight": 1, "extrct": "tag"}}, "did you mean 'extract'"),
        ({"exact": {"extract": "tags"}}, "option 'extract' must be"),
        ({"length": 1.0}, "option 'target' is required"),
        ({"no_such_module_anywhere:reward": 1.0}, "cannot import"),
        ({"math:pi": 1.0}, "not a function"),
        ({5: 1.0}, "expected names, functions or scorers"),
        ({lambda *completions: 1.0: 1.0}, "name the data it needs"),
        ({lambda completion, /: 1.0: 1.0}, "positional-only"),
        ({lambda completion, *, weight=1: 1.0: 1.0}, "rename its option 'weight'"),
        ({lambda completion: 1.0: 1, lambda answer: 1.0: 1}, "two are called '<lambda>'"),
    ],
)
def test_errors_in_the_first_second(specs, message):
    with pytest.raises(ValueError, match=message):
        RewardScorer(specs)


def test_an_async_reward_is_awaited():
    async def later(completion):
        await asyncio.sleep(0)
        return float(len(completion))

    class Later:
        async def __call__(self, completion):
            return 1.0

    assert RewardScorer({later: 1.0}).score_text(PROMPT, "four").value == 4.0
    assert RewardScorer({Later(): 1.0}).score_text(PROMPT, "four").value == 1.0


def test_a_function_of_the_users_own_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "graders_of_mine.py").write_text(
        "def shout(completion, answer, *, bonus: float = 0.0):\n"
        "    return float(completion == answer.upper()) + bonus\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scorer = RewardScorer({"graders_of_mine:shout": {"weight": 2.0, "bonus": 0.5}})
    prompt = Prompt(id="a", text="?", columns={"answer": "yes"})
    assert scorer.score_text(prompt, "YES") == Score(
        value=3.0, parts={"graders_of_mine:shout": 1.5}
    )
    sys.modules.pop("graders_of_mine")


def test_callable_objects_and_partials():
    class Grader:
        def __call__(self, completion, *, scale: float = 1.0):
            return scale * len(completion)

    assert RewardScorer({Grader(): {"scale": 2.0}}).score_text(PROMPT, "abc").parts == {"Grader": 6}
    bound = functools.partial(REWARDS["exact"], extract="tag")
    assert RewardScorer({bound: 1.0}).score_text(PROMPT, "<answer>5</answer>").value == 1.0


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_reward_of_the_table_binds(name):
    required = {
        "length": {"target": 5},
        "overlong": {"limit": 10, "buffer": 4},
        "judge": {"url": "http://localhost", "model": "small"},
    }
    options = required.get(name, {})
    scorer = RewardScorer({name: {"weight": 1.0, **options}})
    assert scorer.rewards[0].function is not None
    assert look_up(name, REWARDS, kind="reward") is REWARDS[name]


def test_rewards_of_tokens_are_weighed_and_added():
    def first(completion):
        return Score(value=1.0, token_rewards=(0.5, 0.0, 0.5))

    class Second:
        def score(self, rollouts):
            return [Score(value=1.0, token_rewards=(1.0, 0.0, 0.0)) for _ in rollouts]

    [made] = RewardScorer({first: 2.0, Second(): -1.0, "exact": 1.0}).score([rollout("5")])
    assert made.token_rewards == (0.0, 0.0, 1.0)
    [made] = RewardScorer({first: 0.0, "exact": 1.0}).score([rollout("5")])
    assert made.token_rewards == ()


def test_rewards_of_other_tokens_are_broken():
    [made] = RewardScorer({Halves(): 1.0}).score([rollout("5")])
    assert not made.ok
    assert made.reason == (
        "reward 'Halves' returned 2 token_rewards for a turn of 3 tokens; give one for each token"
    )


class Halves:
    def score(self, rollouts):
        return [Score(value=1.0, token_rewards=(0.5, 0.5)) for _ in rollouts]
