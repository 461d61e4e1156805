"""The tasks that make their own problems: texts written by hand, splits and counts exact."""

import itertools
from typing import Any

import pytest

from posttrain.protocols import Task
from posttrain.rewards.expressions import evaluate
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import TASKS, PromptTask, full_spec, make_task
from posttrain.tasks.arithmetic import Expression, arithmetic_task, canonical, steps
from posttrain.tasks.board_positions import symmetric, tic_tac_toe_task
from posttrain.tasks.countdown import countdown_task
from posttrain.tasks.sort import sort_task
from posttrain.tasks.splits import held_out, sample_splits, shuffled
from posttrain.types import Prompt

GAMES = {"guess_number", "tic_tac_toe"}


def test_sort_by_its_text():
    task = sort_task(length=3, maximum=9, num_train=500, num_test=100)
    for prompt in (*task.prompts("train"), *task.prompts("test")):
        assert prompt.text.startswith("sort: ")
        assert prompt.text.endswith("\n")
        numbers = [int(word) for word in prompt.text.removeprefix("sort: ").split()]
        assert len(numbers) == 3
        assert all(0 <= number <= 9 for number in numbers)
        assert task.gold(prompt) == " ".join(map(str, sorted(numbers)))


def test_sort_uses_every_list_and_every_order_of_one_stands_on_one_side():
    with pytest.raises(ValueError, match="there are 71 problems for training and 29 for the test"):
        sort_task(length=2, num_train=72, num_test=29)
    task = sort_task(length=2, num_train=71, num_test=29)
    texts = [p.text for split in ("train", "test") for p in task.prompts(split)]
    everything = [f"sort: {x} {y}\n" for x, y in itertools.product(range(10), repeat=2)]
    assert sorted(texts) == sorted(everything)
    golds = [{task.gold(prompt) for prompt in task.prompts(split)} for split in ("train", "test")]
    assert golds[0].isdisjoint(golds[1])


@pytest.mark.parametrize(
    ("numbers", "signs", "worked"),
    [
        ((17, 5), "+", ["17+5=22"]),
        ((5, 17), "-", ["5-17=-12"]),
        ((3, 4, 2), "+*", ["4*2=8", "3+8=11"]),
        ((9, 4, 2), "--", ["9-4=5", "5-2=3"]),  # from the left
        ((1, 2, 3, 4), "-*+", ["2*3=6", "1-6=-5", "-5+4=-1"]),
    ],
)
def test_arithmetic_steps(numbers, signs, worked):
    expression = Expression(numbers, tuple(signs))
    assert steps(expression) == worked
    value, used = evaluate(str(expression))
    assert (str(value), tuple(used)) == (worked[-1].rpartition("=")[2], numbers)


def test_arithmetic_in_both_forms():
    plain = arithmetic_task(num_train=50, num_test=5)
    for prompt in plain.prompts("train"):
        value, _ = evaluate(prompt.text.removesuffix("="))
        assert plain.gold(prompt) == prompt.columns["answer"] == str(value)
    thinking = arithmetic_task(think=True, num_operands=3, num_train=50, num_test=5)
    prompt = thinking.prompts("train")[0]
    worked, answer = prompt.columns["steps"], prompt.columns["answer"]
    assert thinking.gold(prompt) == f"<think>{worked}</think><answer>{answer}</answer>"
    scorer = RewardScorer(thinking.rewards)
    assert scorer.score_text(prompt, answer).value == 0.9  # right, in the wrong form
    assert scorer.score_text(prompt, f"<think>{answer}").value == 0  # nothing is answered
    assert scorer.score_text(prompt, f"<answer>{answer}</answer>").value == 0.9
    assert scorer.score_text(prompt, "<think></think><answer>x</answer>").value == 0.1


@pytest.mark.parametrize(
    ("says", "right"),
    [
        ("{answer}", 1),
        ("{question}{answer}", 1),
        ("The answer is {answer}.", 1),
        (r"So \boxed{{{answer}}}.", 1),
        ("{answer}1", 0),
        ("{answer}, or is it 12345?", 0),
        ("{question}", 0),
    ],
)
def test_a_sum_counts_however_an_instruct_model_writes_it(says, right):
    task = arithmetic_task(operators="+", num_train=50, num_test=5)
    scorer = RewardScorer(task.rewards)
    for prompt in task.prompts("train"):
        text = says.format(question=prompt.text, answer=task.gold(prompt))
        assert scorer.score_text(prompt, text).value == right


@pytest.mark.parametrize(
    ("says", "right"),
    [
        ("{way}", 1),
        ("{way} = {target}", 1),
        ("{target} = {way}", 1),
        ("To make {target}:\n\n\\[ {latex} = {target} \\]", 1),
        (r"$\boxed{{{latex}}}$. It uses 1 + 1 ways.", 1),
        ("We can use {way}. That works.", 1),
        (r"{way} = {target}, so the answer is \boxed{{{target}}}.", 1),
        ("Answer:\nWe have three numbers.\n{way} = {target}", 1),
        ("<answer>{way}</answer>", 1),
        ("I try {way}, but 1+1 is better.", 0),  # the last one
        ("<answer>1+1</answer> {way}", 0),
        ("{way}-1", 0),
        ("{target}", 0),
        ("I do not know.", 0),
    ],
)
@pytest.mark.parametrize("think", [False, True])
def test_a_way_to_the_target_counts_however_an_instruct_model_writes_it(says, right, think):
    task = countdown_task(think=think, num_train=50, num_test=5)
    scorer = RewardScorer(task.rewards)
    for prompt in task.prompts("train"):
        way = prompt.columns["expression"]
        latex = way.replace("*", r" \times ").replace("/", r" \div ")
        text = says.format(way=way, latex=latex, target=prompt.columns["puzzle"]["target"])
        assert scorer.score_text(prompt, text).parts["countdown"] == right


def test_arithmetic_keeps_commuted_problems_on_one_side():
    with pytest.raises(ValueError, match="there are 80 problems for training and 20 for the test"):
        arithmetic_task(operators="+", digits=1, num_train=81, num_test=20)
    task = arithmetic_task(operators="+", digits=1, num_train=80, num_test=20)
    test = {prompt.text for prompt in task.prompts("test")}
    for prompt in task.prompts("test"):
        left, right = prompt.text.removesuffix("=").split("+")
        assert f"{right}+{left}=" in test


def test_canonical_forms():
    def same(text, signs, other, other_signs):
        return canonical(Expression(text, tuple(signs))) == canonical(
            Expression(other, tuple(other_signs))
        )

    assert same((2, 3, 4), "+*", (4, 3, 2), "*+")  # 2+3*4 = 4*3+2
    assert same((9, 1, 2), "--", (9, 2, 1), "--")
    assert not same((2, 3, 4), "+*", (2, 3, 4), "*+")
    assert not same((2, 3), "-", (3, 2), "-")


def test_countdown_puzzles():
    task = countdown_task(num_numbers=4, maximum=9, num_train=300, num_test=50)
    for prompt in task.prompts("train"):
        puzzle = prompt.columns["puzzle"]
        value, used = evaluate(task.gold(prompt))
        assert value == puzzle["target"]
        assert sorted(used) == sorted(puzzle["numbers"])
        assert 1 <= puzzle["target"] <= 100
        assert puzzle["target"] not in puzzle["numbers"]  # or the answer would be one number
        assert (
            f"Make {puzzle['target']} from {', '.join(map(str, puzzle['numbers']))}:" in prompt.text
        )
    identities = [
        (*sorted(p.columns["puzzle"]["numbers"]), p.columns["puzzle"]["target"])
        for split in ("train", "test")
        for p in task.prompts(split)
    ]
    assert len(set(identities)) == len(identities)


def test_countdown_counts_what_there_is():
    # Two numbers from 1 to 3: by hand, without targets that are among the numbers or below 1,
    # 1,1 → 2 (and 1, 0); 1,2 → 3; 1,3 → 4, 2; 2,2 → 4, 1; 2,3 → 5, 6, 1; 3,3 → 6, 9, 1.
    with pytest.raises(ValueError, match=r"there are \d+ problems for") as caught:
        countdown_task(num_numbers=2, maximum=3, num_train=1000)
    words = str(caught.value).split("there are ")[1].split()
    assert int(words[0]) + int(words[5]) == 1 + 1 + 2 + 2 + 3 + 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "sort", "length": 1}, "length must be at least 2"),
        ({"name": "sort", "num_train": 0}, "num_train must be at least 1"),
        ({"name": "sort", "num_test": -1}, "num_test must be at least 0"),
        ({"name": "sort", "lenght": 3}, "did you mean 'length'"),
        ({"name": "sort", "length": "3"}, "option 'length' must be int"),
        ({"name": "arithmetic", "operators": "+/"}, r"some of '\+-\*', each once"),
        ({"name": "arithmetic", "operators": "++"}, "each once"),
        ({"name": "arithmetic", "operators": ""}, "each once"),
        ({"name": "arithmetic", "num_operands": 1}, "num_operands at least 2"),
        ({"name": "countdown", "num_numbers": 1}, "num_numbers must be at least 2"),
        ("srot", "did you mean 'sort'"),
        ({"length": 3}, "a table with a 'name'"),
    ],
)
def test_errors_in_the_first_second(spec, message):
    with pytest.raises(ValueError, match=message):
        make_task(spec)


def test_a_test_split_may_be_left_out():
    assert sort_task(num_test=0).prompts("test") == ()
    with pytest.raises(ValueError, match="expected 'train' or 'test', got 'dev'"):
        sort_task().prompts("dev")


def test_more_of_one_split_leaves_the_other_as_it_is():
    small, large = sort_task(num_train=100, num_test=20), sort_task(num_train=900, num_test=50)
    assert large.prompts("train")[:100] == small.prompts("train")
    assert large.prompts("test")[:20] == small.prompts("test")


def test_a_problem_held_out_is_held_out_for_every_seed():
    train = {
        p.text for seed in range(5) for p in sort_task(length=3, seed=seed, num_train=700).train
    }
    test = {p.text for seed in range(5) for p in sort_task(length=3, seed=seed, num_train=700).test}
    assert train.isdisjoint(test)


def test_held_out_share():
    assert not held_out("anything", share=0.0)
    assert held_out("anything", share=1.0)
    counts = [sum(held_out(str(n), share=share) for n in range(2000)) for share in (0.1, 0.5)]
    assert counts == pytest.approx([200, 1000], rel=0.1)
    # Fixed for good: another hash would move problems between the splits of published results.
    assert [n for n in range(20) if held_out(str(n))] == [8, 9]


def test_shuffled_visits_each_once():
    assert sorted(shuffled(1000, seed=1, num_needed=5)) == list(range(1000))
    some = list(itertools.islice(shuffled(10**30, seed=1, num_needed=5), 1000))
    assert len(set(some)) == 1000
    assert sum(some) / 1000 == pytest.approx(10**30 / 2, rel=0.1)
    assert some[:5] != list(itertools.islice(shuffled(10**30, seed=2, num_needed=5), 5))
    assert len(list(shuffled(10**30, seed=1, num_needed=1))) < 10**6  # a stream that ends


def test_sample_splits_never_looks_further_than_it_must():
    def endless():
        yield from itertools.count()

    train, test = sample_splits(
        endless(), identity=str, num_train=3, num_test=1, kind="task 'x'", fix="y"
    )
    assert all(not held_out(str(number)) for number in train)
    assert [held_out(str(number)) for number in test] == [True]


def prompt(name, text):
    return Prompt(id=name, text=text)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([("a", "1+1=")], [("b", "1+1=")], "test prompt 'b' is also train prompt 'a'"),
        ([("a", "1+1="), ("a", "1+2=")], [], "the same id"),
        ([("a", "1+1=")], [("a", "1+2=")], "the same id"),
        ([("a", " ")], [], "prompt 'a' is empty"),
    ],
)
def test_a_task_checks_itself(train, test, message):
    with pytest.raises(ValueError, match=message):
        PromptTask(
            name="x",
            rewards={},
            train=tuple(prompt(*row) for row in train),
            test=tuple(prompt(*row) for row in test),
            solve=str,
        )


def test_full_spec_and_tasks_of_the_users_own(tmp_path, monkeypatch):
    assert full_spec("sort") == {"name": "sort"}
    assert full_spec({"name": "reasoning_gym:gcd", "seed": 1}) == {
        "name": "reasoning_gym",
        "dataset": "gcd",
        "seed": 1,
    }
    (tmp_path / "tasks_of_mine.py").write_text(
        "from posttrain.tasks import TASKS\n"
        "def easy(*, size: int = 10):\n"
        "    return TASKS['sort'](length=2, num_train=size, num_test=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task: Task = make_task({"name": "tasks_of_mine:easy", "size": 7})
    assert len(task.prompts("train")) == 7
    generated, read = (
        {"sort", "arithmetic", "countdown", "melody"},
        {"gsm8k", "file", "jsonl", "mixture"},
    )
    assert set(TASKS) == {*generated, *GAMES, *read, "reasoning_gym"}


def test_tic_tac_toe_is_tested_on_early_positions_each_played_several_times():
    options: dict[str, Any] = {"num_train": 870, "notation": "letters", "template": "{board}"}
    task = tic_tac_toe_task(**options, test_max_moves=2, test_games=3, num_test=16)
    boards = [prompt.columns["board"] for prompt in task.prompts("test")]
    assert len(boards) == 48
    assert len(set(boards)) == 16
    assert all(board.count(".") >= 7 for board in boards)
    # What is learned from is the same, and nothing of the test is in it, turned or mirrored.
    assert task.prompts("train") == tic_tac_toe_task(**options).prompts("train")
    learned = {turned for prompt in task.train for turned in symmetric(prompt.columns["board"])}
    assert not learned & set(boards)
    for wrong in ({"test_max_moves": 5}, {"test_games": 0}, {"notation": "words"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            tic_tac_toe_task(**wrong)


@pytest.mark.parametrize(
    ("spec", "train", "test"),
    [
        ({"name": "arithmetic", "digits": 1}, 240, 60),
        ({"name": "sort", "length": 3}, 745, 200),
        ({"name": "guess_number", "maximum": 12}, 30, 34),
    ],
)
def test_defaults_take_what_there_is_and_say_so(
    spec: dict[str, Any], train: int, test: int
) -> None:
    task = make_task(spec)
    assert (len(task.prompts("train")), len(task.prompts("test"))) == (train, test)
    counts = f"{train} training and {test} test problems"
    kind = f"task '{spec['name']}'"
    assert task.told == f"{kind}: {counts}; there are fewer than the default 1,000 and 200"
    with pytest.raises(ValueError, match=f"num_train={train + 1}, but there are {train} problems"):
        make_task({**spec, "num_train": train + 1})


def test_a_task_with_enough_problems_says_nothing() -> None:
    assert make_task("sort").told == ""
    assert make_task({"name": "sort", "length": 3, "num_train": 700}).told == ""
