"""A loop of one's own on the public parts takes the very steps of ``posttrain.rl``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, weights

import posttrain
from posttrain import research
from posttrain.algorithms import clipped, group_normalised, sequence_mean

PROMPTS = [f"{a}+{b}=" for a in range(4) for b in range(4)]
OPTIONS: dict[str, Any] = {"steps": 3, "learning_rate": 1e-3}
SHAPE = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4}
OVERRIDES = [f"--model.options.{name}={value}" for name, value in TINY.items()]


def in_digits(completion: str) -> float:
    """How much of the answer is digits."""
    return sum(letter.isdigit() for letter in completion) / max(len(completion), 4)


def opened() -> tuple[posttrain.Policy, research.PromptCycle, research.RewardScorer]:
    policy = posttrain.Policy("tiny", overrides=OVERRIDES)
    prompts = research.PromptCycle([policy.prompt(text) for text in PROMPTS], seed=0)
    return policy, prompts, research.RewardScorer({in_digits: 1.0})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> posttrain.Run:
    return posttrain.rl(
        model="tiny",
        model_options={"options": TINY},
        prompts=PROMPTS,
        reward=in_digits,
        grading={"workers": 0},
        folder=tmp_path_factory.mktemp("rl") / "run",
        algorithm="grpo",
        kl={"placement": "none"},
        check="off",
        **OPTIONS,
        **SHAPE,
    )


def test_a_loop_of_25_lines_takes_the_steps_of_rl(run: posttrain.Run, tmp_path: Path) -> None:
    """As the README has it, with the advantage of the table: the same rewards, losses and
    gradients, but for rounding: ``posttrain.rl`` leaves groups whose rewards agree out of its
    backward passes, and sums in another order.
    """
    policy, prompts, scorer = opened()
    learner = research.make_learner(policy, **OPTIONS)
    sync = policy.engine.sync(learner)
    sampling = posttrain.Sampling(max_new_tokens=4)
    objective = research.Objective(lambda outputs, batch: clipped(outputs.logprobs, batch))
    results, rewards = [], []
    for step in range(3):
        found = research.collect_scored(
            prompts.take(4),
            sampling,
            engine=policy.engine,
            scorer=scorer,
            num_samples=4,
            seed=step,
        )
        batch = research.collate(found.rollouts, pad_token=policy.pad_token)
        results.append(learner.step(sequence_mean(group_normalised(batch)), objective))
        rewards.append(float(batch.need("rewards").mean()))
        sync(step + 1)
    rows = run.metrics().to_pylist()
    for name, values in {
        "loss/total": [result.loss for result in results],
        "train/gradient_norm": [result.gradient_norm for result in results],
        "reward/mean": rewards,
    }.items():
        assert values == pytest.approx([row[name] for row in rows], rel=1e-4, abs=1e-7), name
    assert all(result.gradient_norm > 0 for result in results)
    learner.save(tmp_path / "own")
    assert weights(run.model).keys() == weights(tmp_path / "own").keys()
    text = posttrain.generate(run.model, "1+2=", max_new_tokens=4)[0].text
    assert policy.generate("1+2=", max_new_tokens=4)[0].text == text  # the policy has learned


def test_the_loop_of_rl_with_one_piece_replaced(run: posttrain.Run) -> None:
    """``train`` with a plan of the table gives the numbers of the run; with another advantage it
    gives others.
    """

    def gradients(**changes: Any) -> list[float]:
        policy, prompts, scorer = opened()
        plain = {"kl": {"placement": "none"}}
        learner = research.make_learner(policy, **OPTIONS)
        plan = replace(research.make_plan(policy, algorithm="grpo", **plain, **OPTIONS), **changes)
        source = research.RolloutSource(
            policy.engine,
            scorer,
            prompts=prompts,
            sampling=posttrain.Sampling(max_new_tokens=4),
            prompts_per_step=4,
            group_size=4,
            seed=0,
        )
        steps: list[research.Step] = []
        research.train(
            source.steps(3),
            learner,
            plan=plan,
            sync=policy.engine.sync(learner),
            pad_token=policy.pad_token,
            seed=0,
            on_step=steps.append,
        )
        return [step.metrics()["train/gradient_norm"] for step in steps]

    rows = run.metrics().to_pylist()
    expected = [row["train/gradient_norm"] for row in rows]
    assert gradients() == pytest.approx(expected, rel=1e-4)

    def doubled(batch: posttrain.Batch) -> posttrain.Batch:
        made = group_normalised(batch)
        return made.replace(advantages=2 * made.need("advantages"))

    first = gradients(advantage=doubled)[0]
    assert first == pytest.approx(2 * expected[0], rel=1e-4)


def test_options_are_those_of_a_recipe() -> None:
    policy, _, _ = opened()
    with pytest.raises(ValueError, match=r"learning_rat.*learning_rate"):
        research.make_learner(policy, learning_rat=1e-3)
    assert research.make_plan(policy, algorithm="grpo", steps=3).kl_placement == "loss"
    assert research.make_plan(policy, steps=3).kl_placement == "none"
