"""The one-file example takes the same steps as the library, and is short enough to be read."""

import copy
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from posttrain.algorithms.advantages import group_normalised
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import sequence_mean, total
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.frozen import Reference
from posttrain.pipelines.plan import Plan, State, make_objective
from posttrain.pipelines.rl import Step, train
from posttrain.protocols import Outputs
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Batch, Prompt, Rollout, Sampling, Score

FILE = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"
SEED, STEPS, PROMPTS_PER_STEP, GROUP_SIZE, LENGTH = 3, 3, 4, 6, 3
RATE, BETA = 3e-3, 0.2  # on-policy the loss shows nothing but β·KL: large enough to compare


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with a KL penalty that shows."""
    spec = importlib.util.spec_from_file_location("grpo_one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "KL_COEFFICIENT", BETA)
    return module


def plan(clip: float) -> Plan:
    """The grpo row with the options of the example."""
    return Plan(
        advantage=group_normalised,
        loss=functools.partial(clipped, clip_low=clip, clip_high=clip),
        weights=sequence_mean,
        kl_placement="loss",
        kl_estimator="k3",
        kl=Coefficient(value=BETA),
    )


def reward(tokens: Sequence[int]) -> float:
    """Graded, so that every group has something to compare."""
    return sum(token % 3 for token in tokens) / 2


class TokenScorer:
    """Scores tokens, as the example's reward does."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=reward(rollout.tokens)) for rollout in rollouts]


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten().clone() for weight in model.parameters()])


def library_run(example: ModuleType, model: torch.nn.Module) -> tuple[list[Step], list]:
    """Three steps by the library: what it reported and the gradient of each step."""
    engine = NativeEngine(model, end_tokens=(example.END,), decode=example.decode)
    prompts = [
        Prompt(id=str(n), text=text, tokens=tuple(example.encode(text)))
        for n, text in enumerate(f"{a}+{b}=" for a in range(3) for b in range(4))
    ]
    source = RolloutSource(
        engine,
        TokenScorer(),
        prompts=PromptCycle(prompts, seed=SEED),
        sampling=Sampling(max_new_tokens=LENGTH),
        prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP_SIZE,
        seed=SEED,
    )
    learner = LocalLearner(
        model, adamw(model, learning_rate=RATE), save=lambda folder: None, reference=Reference()
    )
    reports: list[Step] = []
    slopes: list[torch.Tensor] = []

    def on_step(report: Step) -> None:
        reports.append(report)
        slopes.append(gradients(model))

    train(
        source.steps(STEPS),
        learner,
        plan=plan(example.CLIP),
        sync=SharedWeights(engine),
        pad_token=example.END,
        seed=SEED,
        on_step=on_step,
    )
    return reports, slopes


def test_three_steps_equal_those_of_the_library(example: ModuleType) -> None:
    """Same weights, prompts and seeds: same rollouts, losses and gradients, step for step."""
    mine = example.make_model(seed=1)
    reference = copy.deepcopy(mine).requires_grad_(False)
    reports, slopes = library_run(example, copy.deepcopy(mine))
    optimizer = torch.optim.AdamW(mine.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for call, (report, slope) in enumerate(zip(reports, slopes, strict=True)):
        rollouts = report.collected.rollouts
        loss, mean_reward = example.grpo_step(
            mine,
            reference,
            optimizer=optimizer,
            prompts=[list(rollout.prompt.tokens) for rollout in rollouts[::GROUP_SIZE]],
            reward=lambda prompt, completion: reward(completion),
            seed=SEED * 1_000_003 + call,  # what RolloutSource gives the engine
            group_size=GROUP_SIZE,
            max_new_tokens=LENGTH,
        )
        # The policy term of the first, on-policy step sums to zero: only rounding is left of it.
        assert loss == pytest.approx(report.metrics()["loss/total"], rel=1e-5, abs=1e-7)
        assert mean_reward == pytest.approx(report.metrics()["reward/mean"], rel=1e-12)
        assert (gradients(mine) - slope).norm() < 1e-4 * slope.norm()
        assert call == 0 or loss > 1e-2


def test_the_loss_is_the_librarys_off_policy_too(example: ModuleType) -> None:
    """Where the ratio has left 1 and the clip bites, both still give the same number."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, reference = -torch.rand(3, 8, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) >= torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])[:, None]
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
    batch = Batch(
        tokens=torch.zeros(8, 5, dtype=torch.long),
        mask=mask,
        old_logprobs=old,
        ref_logprobs=reference,
        advantages=advantages[:, None].expand(8, 5),
    )
    objective = make_objective(plan(example.CLIP), State(kl=Coefficient(value=BETA)), batch=batch)
    batch = sequence_mean(batch)
    terms = objective(Outputs(logprobs=logprobs), batch)
    expected = example.grpo_loss(
        logprobs, old=old, reference=reference, advantages=advantages, mask=mask
    )
    assert terms.means["clip_high"].sum() > 2
    assert terms.means["clip_low"].sum() > 2
    assert float(total(terms.loss, batch)) == pytest.approx(float(expected), rel=1e-12)


def test_it_can_be_read_in_one_sitting() -> None:
    """At most 300 lines, and nothing of posttrain in it."""
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert "import posttrain" not in text
    assert "from posttrain" not in text
