"""Where rollouts come from: prompts in a cycle, groups that are thrown back, seeds of their own."""

from collections import Counter
from collections.abc import Sequence

import pytest

from posttrain.rollout.collect import RolloutSource, has_signal
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Prompt, Rollout, Sampling, Score, Turn


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(n), text=f"question {n}") for n in range(count)]


class SeedEngine(ScriptedEngine):
    """Remembers the seeds and the sizes it was asked with."""

    def __init__(self, *answers: str) -> None:
        super().__init__(lambda prompt, sample: answers[sample % len(answers)])
        self.asked: list[tuple[int, int]] = []
        self.samplings: list[tuple[Sampling, int]] = []

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[list[Rollout]]:
        self.asked.append((seed, len(prompts)))
        self.samplings.append((sampling, num_samples))
        return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)


class Grader:
    """Prompts whose number is in ``hard`` have groups that differ; all others agree."""

    def __init__(self, hard: Sequence[int]) -> None:
        self.hard = {str(number) for number in hard}

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(value=float(rollout.prompt.id in self.hard and rollout.text == "b"))
            for rollout in rollouts
        ]


def source(
    *,
    hard: Sequence[int] = (),
    max_resamples: int = 0,
    count: int = 12,
    seed: int = 5,
    greedy: bool = False,
    answers: tuple[str, ...] = ("a", "b"),
) -> tuple[RolloutSource, SeedEngine]:
    engine = SeedEngine(*answers)
    made = RolloutSource(
        engine,
        Grader(hard),
        prompts=PromptCycle(prompts(count), seed=seed),
        sampling=Sampling(max_new_tokens=7, temperature=0.8, top_k=3, top_p=0.9),
        prompts_per_step=4,
        group_size=2,
        seed=seed,
        max_resamples=max_resamples,
        greedy=greedy,
    )
    return made, engine


def ids(cycle: PromptCycle, count: int) -> list[str]:
    return [prompt.id for prompt in cycle.take(count)]


def test_every_prompt_once_in_each_pass_in_a_new_order() -> None:
    """Also where steps do not divide the pass."""
    cycle = PromptCycle(prompts(10), seed=0)
    taken = [name for _ in range(10) for name in ids(cycle, 3)]
    passes = [taken[start : start + 10] for start in range(0, 30, 10)]
    assert all(sorted(each) == [str(n) for n in range(10)] for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_the_seed_decides_the_order() -> None:
    """Equal seeds, equal orders; other seeds share no pass."""
    assert ids(PromptCycle(prompts(10), seed=3), 30) == ids(PromptCycle(prompts(10), seed=3), 30)
    first, second = (
        ids(PromptCycle(prompts(10), seed=0), 50),
        ids(PromptCycle(prompts(10), seed=1), 50),
    )
    passes = [
        tuple(taken[start : start + 10]) for taken in (first, second) for start in range(0, 50, 10)
    ]
    assert len(set(passes)) == 10


def test_a_cycle_resumes_by_its_position() -> None:
    """Setting the position is all that it takes, in the middle of a pass and across its end."""
    whole = ids(PromptCycle(prompts(7), seed=2), 40)
    for position in (0, 3, 7, 20):
        resumed = PromptCycle(prompts(7), seed=2)
        resumed.position = position
        assert ids(resumed, 40 - position) == whole[position:]


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="the training split is empty"):
        PromptCycle([], seed=0)


def test_rollouts_of_a_step_stand_in_groups_with_their_scores() -> None:
    """Groups are numbered from 0, completions in the engine's order, each with its own score."""
    made, _ = source(hard=range(12))
    (collected,) = made.steps(1)
    assert [rollout.group for rollout in collected.rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rollout.text for rollout in collected.rollouts] == ["a", "b"] * 4
    assert [rollout.score.value for rollout in collected.rollouts if rollout.score] == [
        0.0,
        1.0,
    ] * 4
    assert len({rollout.prompt.id for rollout in collected.rollouts}) == 4
    assert collected.resampled == 0
    assert all(seconds > 0 for seconds in collected.seconds.values())


def test_every_call_has_a_seed_of_its_own() -> None:
    """Steps and resamples never draw the same numbers, nor do runs with other seeds."""
    made, engine = source(max_resamples=2)
    other, second = source(max_resamples=2, seed=6)
    list(made.steps(3))
    list(other.steps(3))
    seeds = [seed for seed, _ in engine.asked + second.asked]
    assert len(seeds) == 18
    assert len(set(seeds)) == 18
    assert made.num_calls == 9


def test_a_source_samples_only_when_it_is_asked() -> None:
    """On-policy: the next batch must come from the weights after the last step."""
    made, engine = source()
    steps = made.steps(5)
    next(steps)
    assert len(engine.asked) == 1
    assert made.prompts.position == 4


def test_without_resamples_groups_that_agree_are_kept() -> None:
    made, engine = source(hard=())
    (collected,) = made.steps(1)
    assert len(collected.rollouts) == 8
    assert [size for _, size in engine.asked] == [4]


def test_dynamic_sampling_keeps_only_groups_with_signal() -> None:
    """Half of the prompts teach: what is missing is asked again until the step is full."""
    made, engine = source(hard=range(0, 12, 2), max_resamples=8)
    for collected in made.steps(3):
        groups: dict[int, list[Rollout]] = {}
        for rollout in collected.rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        assert sorted(groups) == [0, 1, 2, 3]
        assert all(len(group) == 2 and has_signal(group) for group in groups.values())
    sizes = Counter(size for _, size in engine.asked)
    assert sum(size * times for size, times in sizes.items()) == made.prompts.position


def test_resamples_are_counted_and_bounded() -> None:
    """One prompt teaches, and comes second in the second round: it leads, others fill the step."""
    teaches = ids(PromptCycle(prompts(12), seed=5), 6)[5]
    made, engine = source(hard=[int(teaches)], max_resamples=2)
    (collected,) = made.steps(1)
    assert [size for _, size in engine.asked] == [4, 4, 4]  # 3 are missing, 1 of 8 taught
    assert len(collected.rollouts) == 8
    assert collected.resampled == 4 + 4 + 4 - 4
    assert [rollout.prompt.id == teaches for rollout in collected.rollouts] == [True] * 2 + [
        False
    ] * 6


def test_what_is_missing_is_drawn_by_the_share_that_taught() -> None:
    """Of 4 prompts 3 teach, so 2 are drawn for the missing one; one too many is left out."""
    order = [int(name) for name in ids(PromptCycle(prompts(12), seed=5), 6)]
    made, engine = source(hard=[*order[:3], *order[4:]], max_resamples=8)
    (collected,) = made.steps(1)
    assert [size for _, size in engine.asked] == [4, 2]
    taught = [str(order[number]) for number in (0, 1, 2, 4)]
    assert [rollout.prompt.id for rollout in collected.rollouts[::2]] == taught
    assert collected.resampled == 2
    assert made.prompts.position == 6


def test_where_nothing_teaches_a_step_still_has_its_size() -> None:
    made, engine = source(hard=(), max_resamples=3)
    (collected,) = made.steps(1)
    assert [size for _, size in engine.asked] == [4, 4, 4, 4]
    assert [rollout.group for rollout in collected.rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert collected.resampled == 12


def test_broken_scores_are_no_signal() -> None:
    """A grader that broke on one of two completions does not make a group that differs."""
    done = Turn(tokens=(), logprobs=(), text="", stop_reason="stop", version=0)

    def group(*scores: Score) -> list[Rollout]:
        prompt = Prompt(id="0", text="")
        return [Rollout(prompt=prompt, turns=(done,), group=0, score=score) for score in scores]

    broken = Score(value=0.0, state="crashed")
    assert has_signal(group(Score(value=1.0), Score(value=0.0)))
    assert not has_signal(group(Score(value=1.0), broken))
    assert not has_signal(group(Score(value=1.0), Score(value=1.0), broken))
    assert has_signal(group(Score(value=1.0), broken, Score(value=0.5)))


def test_every_prompt_is_also_answered_greedily_where_that_is_asked_for() -> None:
    """One greedy answer of each prompt, scored, on every rollout of its group, and no rollout."""
    made, engine = source(hard=range(12), greedy=True, answers=("b", "a"))
    (collected,) = made.steps(1)
    assert [rollout.text for rollout in collected.rollouts] == ["b", "a"] * 4
    drawn, greedy = engine.samplings
    assert drawn == (Sampling(max_new_tokens=7, temperature=0.8, top_k=3, top_p=0.9), 2)
    assert greedy == (Sampling(max_new_tokens=7, temperature=0.0), 1)
    assert [size for _, size in engine.asked] == [4, 4]
    for rollout in collected.rollouts:
        assert rollout.greedy is not None
        assert rollout.greedy.prompt is rollout.prompt
        assert (rollout.greedy.group, rollout.greedy.text) == (rollout.group, "b")
        assert rollout.greedy.score == Score(value=1.0)
    assert made.num_calls == 1  # the seeds of what is drawn are those of a source without


def test_what_is_drawn_is_the_same_with_and_without_greedy_answers() -> None:
    plain, first = source(hard=range(0, 12, 2), max_resamples=2)
    greedy, second = source(hard=range(0, 12, 2), max_resamples=2, greedy=True)
    for one, other in zip(plain.steps(3), greedy.steps(3), strict=True):
        assert [r.turns for r in one.rollouts] == [r.turns for r in other.rollouts]
        assert [r.prompt.id for r in one.rollouts] == [r.prompt.id for r in other.rollouts]
        assert all(r.greedy is None for r in one.rollouts)
    drawn = [
        asked for asked, (_, size) in zip(second.asked, second.samplings, strict=True) if size == 2
    ]
    assert drawn == first.asked


def test_a_group_that_agrees_teaches_where_its_greedy_answer_differs() -> None:
    done = Turn(tokens=(), logprobs=(), text="", stop_reason="stop", version=0)

    def scored(score: Score, greedy: Score) -> Rollout:
        prompt = Prompt(id="0", text="")
        base = Rollout(prompt=prompt, turns=(done,), group=0, score=greedy)
        return Rollout(prompt=prompt, turns=(done,), group=0, score=score, greedy=base)

    right, wrong, broken = Score(value=1.0), Score(value=0.0), Score(value=0.0, state="crashed")
    assert has_signal([scored(right, wrong)])
    assert not has_signal([scored(right, right)])
    assert not has_signal([scored(right, broken)])
