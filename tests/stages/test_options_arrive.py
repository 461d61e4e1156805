"""What a recipe sets reaches the part it is about: Adam's betas, the kind of deviation."""

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import recipe, small_run

import posttrain
from posttrain.build.algorithm import make_plan
from posttrain.build.learners import make_learner, make_reward_learner
from posttrain.config import recipe_from_dict, resolve
from posttrain.models.load import load_policy
from posttrain.models.reward import reward_from_policy
from posttrain.pipelines.plan import State
from posttrain.pipelines.rl import prepare
from posttrain.rollout.engines.local import LocalEngine
from posttrain.runs import rollout_table
from posttrain.types import Batch, Sampling

BETAS = [0.8, 0.99]


def resolved(**sections: Any) -> Any:
    return resolve(recipe_from_dict({"task": "arithmetic", **sections}))


def betas(optimizer: torch.optim.Optimizer) -> set[tuple[float, float]]:
    return {tuple(group["betas"]) for group in optimizer.param_groups}


@pytest.mark.parametrize(
    ("given", "expected"), [({}, (0.9, 0.95)), ({"adam_betas": BETAS}, (0.8, 0.99))]
)
def test_the_betas_of_every_stage(given: dict[str, Any], expected: tuple[float, float]) -> None:
    """The critic of [rl], which has a learning rate of its own, follows [rl] in this."""
    policy = load_policy("tiny")
    for stage, values in (("sft", given), ("rl", {"algorithm": "ppo", **given})):
        recipe = resolved(**{stage: values})
        section = getattr(recipe, stage)
        learner = make_learner(recipe, policy, section=section, device="cpu", total_steps=1)
        assert betas(learner.trained.optimizer) == {expected}
        if stage == "rl":
            assert learner.critic is not None
            assert betas(learner.critic.optimizer) == {expected}
    recipe = resolved(reward=given, prefer={})
    learner = make_reward_learner(
        recipe,
        reward_from_policy(policy, seed=0),
        section=recipe.reward,
        device="cpu",
        total_steps=1,
    )
    assert betas(learner.trained.optimizer) == {expected}


def test_stop_strings_end_what_is_learned_from_and_what_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    generate = LocalEngine.generate

    def listening(self: Any, prompts: Any, sampling: Sampling, **given: Any) -> Any:
        asked.append(sampling.stop)
        return generate(self, prompts, sampling, **given)

    monkeypatch.setattr(LocalEngine, "generate", listening)
    stop = [character for character in string.printable if character not in " ="]
    changes = {"steps": 1, "stop": stop, "evaluate_every": 1, "advantage": "greedy_baseline"}
    done, _ = small_run(recipe(tmp_path / "run", sft=None, rl=changes))
    # Before, at the beginning, samples and their greedy baseline, at the end, after.
    assert asked == [tuple(stop)] * 6
    posttrain.evaluate(done.folder.path)
    answers = posttrain.generate(done.folder.path, "1+2=", num_samples=2, temperature=1.0)
    assert asked == [tuple(stop)] * 8  # the finished run is asked as it was trained
    assert not any(set(answer.text) & set(stop) for answer in answers)
    rollouts = rollout_table(done.folder.stage("rl").rollouts).to_pylist()
    stopped = [row for row in rollouts if row["stop_reason"] == "stop_string"]
    assert stopped
    assert all(row["length"] > 0 and not set(row["completion"]) & set(stop) for row in stopped)


class NoLearner:
    """Nothing of it is asked where the batch has all that is wanted."""

    def infer(self, batch: Batch) -> Batch:
        return batch


@pytest.mark.parametrize(
    ("given", "divisor"),
    # Rewards 3 and 1 at the last of two tokens each: 3, 0, 1, 0 have mean 1 and squares 4 + 1 + 1.
    [(False, 1.0), (True, 1.5**0.5), ("population", 1.5**0.5), ("sample", 2.0**0.5)],
)
def test_rewards_are_whitened_by_the_deviation_that_is_asked_for(
    given: bool | str, divisor: float
) -> None:
    rl = {"algorithm": "reinforce", "advantage": "return_to_go", "whiten_rewards": given}
    plan = make_plan(resolved(rl=rl).rl)
    rewards = torch.tensor([3.0, 1.0], dtype=torch.float64)
    batch = Batch.from_tensors(
        torch.ones(2, 2), rewards=rewards, groups=torch.arange(2), valid=torch.ones(2).bool()
    )
    made = prepare(batch, NoLearner(), plan=plan, state=State(kl=plan.kl))
    expected = (rewards / divisor)[:, None].expand(2, 2)
    torch.testing.assert_close(made.need("advantages"), expected, rtol=1e-12, atol=0)
