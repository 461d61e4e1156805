"""Evaluation: estimates by brute force and by published values, and answers known beforehand."""

import itertools
from functools import partial

import pytest

from posttrain.pipelines.evaluate import evaluate, mean, pass_at_k, share
from posttrain.protocols import Engine, Sampler, Scorer
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.types import Prompt, Rollout, Sampling, Score, Turn
from posttrain.types.marks import Marks, exceeding_one, is_right


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    """Over all k of n answers, for every count of right ones."""
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        answers = [index < correct for index in range(samples)]
        subsets = list(itertools.combinations(answers, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, correct, k=k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_needs_k_answers() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match=rf"between 1 and the 4 samples, got {k}"):
            pass_at_k(4, 1, k=k)


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_as_published(hits: int, total: int, low: float, high: float) -> None:
    """The score interval without continuity correction."""
    found = share(hits, total)
    assert found.value == hits / total
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("total", range(1, 200))
def test_an_interval_that_reaches_an_end_has_it_as_a_bound(total: int) -> None:
    """Without what rounding leaves of the square root: 1.7e-18 is no share of anything."""
    assert share(0, total).low == 0.0
    assert share(total, total).high == 1.0


def test_interval_of_a_mean_by_hand() -> None:
    """Mean ± 1.96 · sample deviation / √n, cut to [0, 1]."""
    found = mean([0.25, 0.5, 0.75])
    half = 1.959964 * 0.25 / 3**0.5
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.0] * 20, 0.0, 0.1611),  # Newcombe's, as above
        ([1.0] * 20, 0.8389, 1.0),
        ([0.1] * 3, 0.0068, 0.6424),
        ([0.0], 0.0, 0.7935),
    ],
)
def test_problems_that_agree_have_a_wilson_interval(
    values: list[float], low: float, high: float
) -> None:
    """The normal one would have no width, even from one problem."""
    found = mean(values)
    assert found.value == pytest.approx(values[0], rel=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def sampler(engine: Engine, scorer: Scorer) -> Sampler:
    return partial(collect_scored, engine=engine, scorer=scorer)


EXACT = Marks(check="exact", full={"exact": 1.0, "format": 1.0})
QUESTIONS = [Prompt(id=str(n), text=f"{n}+1=", columns={"answer": str(n + 1)}) for n in range(4)]


def answer(prompt: Prompt, sample: int) -> str:
    """Problem n has n right answers among every four, the greedy one first."""
    return prompt.columns["answer"] if sample < int(prompt.id) else "wrong"


def test_evaluate_with_known_answers() -> None:
    """Greedy accuracy 3/4; problem n has n of 4 samples right."""
    found = evaluate(
        sampler(ScriptedEngine(answer), RewardScorer({"exact": 2.0})),
        QUESTIONS,
        marks=EXACT,
        sampling=Sampling(max_new_tokens=9, temperature=0.8),
        samples=4,
    )
    assert list(found.estimates) == ["accuracy", "mean@4", "pass@1", "pass@2", "pass@4"]
    values = {name: estimate.value for name, estimate in found.estimates.items()}
    assert values["accuracy"] == found.accuracy.value == 0.75
    assert values["mean@4"] == values["pass@1"] == pytest.approx((0 + 1 + 2 + 3) / 16)
    assert values["pass@2"] == pytest.approx((0 + 3 / 6 + 5 / 6 + 1) / 4)
    assert values["pass@4"] == 0.75
    assert found.mean_reward == 1.5
    assert found.invalid == 0
    assert [is_right(rollout, EXACT) for rollout in found.greedy] == [False, True, True, True]
    assert [rollout.group for rollout in found.sampled] == [n for n in range(4) for _ in range(4)]


def test_three_samples_give_pass_at_1_2_and_3() -> None:
    found = evaluate(
        sampler(ScriptedEngine(answer), RewardScorer({"exact": 1.0})),
        QUESTIONS,
        marks=EXACT,
        sampling=Sampling(),
        samples=3,
    )
    assert list(found.estimates) == ["accuracy", "mean@3", "pass@1", "pass@2", "pass@3"]


def test_greedy_is_greedy_whatever_the_sampling() -> None:
    """The engine is asked at temperature 0 without top-k and top-p, then as told."""
    asked: list[Sampling] = []

    class Watched(ScriptedEngine):
        def generate(self, prompts, sampling, *, num_samples: int, seed: int):
            asked.append(sampling)
            return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)

    sampling = Sampling(max_new_tokens=9, temperature=0.8, top_k=5, top_p=0.5)
    evaluate(
        sampler(Watched(answer), RewardScorer({"exact": 1.0})),
        QUESTIONS,
        marks=EXACT,
        sampling=sampling,
        samples=2,
    )
    assert asked == [Sampling(max_new_tokens=9, temperature=0.0), sampling]


@pytest.mark.parametrize("rewards", [{"grade": 1.0}, {"grade": 0.0, "length": 1.0}])
def test_a_broken_grader_is_counted_and_is_not_right(rewards: dict[str, float]) -> None:
    """One in four: the answer counts as wrong, its share is reported, its value is not averaged.

    So it is where the reward that decides only watches, and another is learned from.
    """

    def grade(completion: str, answer: str) -> float:
        if answer == "4":
            raise RuntimeError("no grader")
        return float(completion == answer)

    def length(completion: str) -> float:
        return float(len(completion))

    functions = {"grade": grade, "length": length}
    found = evaluate(
        sampler(
            ScriptedEngine(answer),
            RewardScorer({functions[name]: weight for name, weight in rewards.items()}),
        ),
        QUESTIONS,
        marks=Marks(check="grade", full={"grade": 1.0, "length": 1.0}),
        sampling=Sampling(),
    )
    assert found.accuracy.value == 0.5
    assert found.invalid == 0.25
    assert "no grader" in found.greedy[3].score.reason
    assert "no grader" in found.reason


def test_only_the_named_reward_decides() -> None:
    """A formatting reward neither makes an answer right nor wrong."""
    completion = Turn(tokens=(), logprobs=(), text="", stop_reason="stop", version=0)
    for parts, right in (
        ({"exact": 1.0, "format": 0.0}, True),
        ({"exact": 0.5, "format": 1.0}, False),
    ):
        score = Score(value=5.0, parts=parts)
        assert (
            is_right(Rollout(prompt=QUESTIONS[0], turns=(completion,), group=0, score=score), EXACT)
            is right
        )


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="the test split is empty"):
        evaluate(
            sampler(ScriptedEngine(answer), RewardScorer({"exact": 1.0})),
            [],
            marks=EXACT,
            sampling=Sampling(),
        )


def marks(rewards: RewardScorer, check: str = "") -> Marks:
    full = {reward.name: reward.full_marks for reward in rewards.rewards}
    return Marks(
        check=check,
        weights={reward.name: reward.weight for reward in rewards.rewards},
        full={name: most for name, most in full.items() if most is not None},
        undeclared=frozenset(r.name for r in rewards.rewards if r.maximum is None),
    )


def test_where_nothing_checks_answers_each_reward_has_its_full_marks() -> None:
    """By name, with a positive weight; the samples too. There is no accuracy."""

    def short(completion: str) -> float:
        return float(len(completion) < 3)

    def seen(completion: str) -> float:
        return 1.0

    rewards = RewardScorer({"exact": 1.0, short: 0.5, seen: 0.0})
    found = evaluate(
        sampler(ScriptedEngine(answer), rewards),
        QUESTIONS,
        marks=marks(rewards),
        sampling=Sampling(max_new_tokens=9),
        samples=2,
    )
    assert found.accuracy is None
    names = ["full_marks", "mean@2", "pass@1", "pass@2"]
    assert list(found.estimates) == [
        f"{n}/{reward}" for reward in ("exact", "short") for n in names
    ]
    assert found.estimates["full_marks/exact"].value == 0.75
    assert found.estimates["mean@2/short"].value == found.estimates["mean@2/exact"].value == 5 / 8
    assert found.metrics == {
        "eval/full_marks/exact": 0.75,
        "eval/full_marks/short": 0.75,
        "eval/part/exact": 0.75,
        "eval/part/short": 0.75,
        "eval/part/seen": 1.0,
        "eval/reward": 0.75 * 1.5,
        "eval/invalid": 0.0,
    }


@pytest.mark.parametrize("check", ["", "ten"])
@pytest.mark.parametrize("most", [None, 10.0, 20.0])
def test_full_marks_are_the_declared_maximum_or_unknown_above_one(
    check: str, most: float | None
) -> None:
    """Ten for right, two for wrong: nothing is 100 % because every score is above 1."""

    def ten(completion: str, answer: str) -> float:
        return 10.0 if completion == answer else 2.0

    rewards = RewardScorer({ten: {"weight": 1.0} | ({} if most is None else {"maximum": most})})
    found = evaluate(
        sampler(ScriptedEngine(answer), rewards),
        QUESTIONS,
        marks=marks(rewards, check),
        sampling=Sampling(max_new_tokens=9),
    )
    name = "accuracy" if check else "full_marks/ten"
    known = {} if most is None else {name: 0.75 if most == 10 else 0.0}
    assert {key: estimate.value for key, estimate in found.estimates.items()} == known
    assert found.above_one == ({"ten": 10.0} if most is None else {})
    assert found.mean_reward == 8.0
    label = "accuracy (ten)" if check else "full marks of ten"
    unknown = f"{label} — (no maximum declared; largest seen 10)"
    assert (unknown in repr(found)) == (most is None)


def test_a_reward_model_has_no_full_marks() -> None:
    """A score of any scale: 1 means nothing there, whatever the weight."""
    judged = Marks(weights={"model": 1.0, "exact": 0.0}, full={"exact": 1.0})
    assert judged.counted_rewards == ()
    scored = Rollout(
        prompt=QUESTIONS[0],
        turns=(Turn(tokens=(), logprobs=(), text="", stop_reason="stop", version=0),),
        group=0,
        score=Score(value=5.0, parts={"model": 5.0}),
    )
    assert not is_right(scored, judged)
    assert exceeding_one([scored], judged) == {}


def test_a_broken_score_is_in_no_mean() -> None:
    """Were it a 0, a grader that breaks would lift the mean of a penalty."""

    def penalty(completion: str) -> float:
        if completion.endswith("1"):
            raise ValueError("out of order")
        return -1.0

    found = evaluate(
        sampler(ScriptedEngine(lambda prompt, number: prompt.text), RewardScorer({penalty: 1.0})),
        [Prompt(id=str(n), text=f"q{n}", tokens=(1,)) for n in range(4)],
        marks=Marks(weights={"penalty": 1.0}, full={"penalty": 0.0}),
        sampling=Sampling(max_new_tokens=9),
    )
    assert found.invalid == 0.25
    assert found.mean_reward == found.parts["penalty"] == -1.0
