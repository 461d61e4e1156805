"""Datasets of reasoning-gym: the hint where it is missing, and what its scorers do where it is."""

import contextlib
import importlib.util
import json
import sys

import pytest

from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import make_task
from posttrain.tasks.reasoning_gym import REFUSED, Entry, reasoning_gym_task

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


def test_the_hint_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain\[reasoning_gym\]'"):
        make_task("reasoning_gym:basic_arithmetic")


def test_an_entry_is_a_plain_table_to_a_file():
    assert json.loads(json.dumps(Entry({"question": "?"}, dataset="gcd"))) == {
        "question": "?",
        "dataset": "gcd",
    }


@installed
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name):
    with pytest.raises(ValueError, match="refused, because"):
        make_task(f"reasoning_gym:{name}")


@installed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "settings": {"seed": 1}}, "'seed' is not for settings"),
        ({"dataset": "chain_sum", "settings": {"min_term": 1}}, "min_term"),
        ({"dataset": "chain_sum", "settings": {"min_terms": 0}}, "settings"),
    ],
)
def test_faults(options, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym_task(**options)


@installed
def test_its_own_scorer_scores():
    task = make_task(
        {
            "name": "reasoning_gym:chain_sum",
            "settings": {"min_terms": 2, "max_terms": 2},
            "num_train": 20,
            "num_test": 5,
        }
    )
    prompt = task.prompts("train")[0]
    assert prompt.columns["entry"]["metadata"]["num_terms"] == 2
    scorer = RewardScorer(task.rewards)
    assert scorer.score_text(prompt, task.gold(prompt)).parts == {"reasoning_gym": 1, "format": 1}
    said = scorer.score_text(prompt, f"The answer is {prompt.columns['answer']}.")
    assert (said.value, dict(said.parts)) == (1, {"reasoning_gym": 1, "format": 0})  # no tag
    words = make_task({"name": "reasoning_gym:letter_jumble", "num_train": 20, "num_test": 5})
    prompt = words.prompts("train")[0]
    scorer = RewardScorer(words.rewards)
    assert scorer.score_text(prompt, words.gold(prompt)).value == 1
    assert scorer.score_text(prompt, prompt.columns["answer"]).value == 0  # no tag
    seeds = [
        {p.text for p in reasoning_gym_task(dataset="gcd", seed=seed, num_train=50).train}
        for seed in (0, 1)
    ]
    assert len(seeds[0] & seeds[1]) < 5  # neighbouring seeds are far apart


@installed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_scorer_executes_an_answer(tmp_path):
    """The table of refused datasets is complete for the version that is installed."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    folder = tmp_path / "made_by_an_answer"
    call = f"__import__('os').mkdir('{folder}')"
    executing = set()
    for name in sorted(set(DATASETS) - {"composite"}):
        dataset = reasoning_gym.create_dataset(name, size=1, seed=3)
        entry = dataset[0]
        for answer in (call, f"[{call}]", f"[[{call}]]", f"{{'a': {call}}}", f"x+{call}"):
            with contextlib.suppress(Exception):  # what it scores is no matter here
                dataset.score_answer(answer, entry)
            if folder.exists():
                folder.rmdir()
                executing.add(name)
    assert executing == {name for name, why in REFUSED.items() if "executes" in why}
