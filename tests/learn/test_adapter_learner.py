"""A learner of adapters: the base stays, the reference is the model itself, no way is lost."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learn.test_checkpoint import batch, objective
from small_model import OPTIONS, naive_logprobs, small_model
from torch import Tensor, nn

from posttrain.algorithms.losses.value import squared
from posttrain.data.collate import collate
from posttrain.fast.score import score_tokens
from posttrain.learn.checkpoint import load_learner, save_learner
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.adapters import copy_of_trained, round_base
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy, with_adapters
from posttrain.protocols import Objective
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Prompt, Sampling, Score

RATE = 5e-3


def policy(folder: Path, *, dtype: torch.dtype = torch.float32) -> Policy:
    plain = replace(load_policy("tiny", options=OPTIONS), model=small_model(dtype=dtype))
    return with_adapters(plain, {"rank": 4}, seed=0, folder=folder)


def learner(made: Policy, kind: str = "none", **options: object) -> LocalLearner:
    critic = None
    if kind != "none":
        module = separate_critic(made) if kind == "separate" else shared_critic(made)
        critic = Trained(module, adamw(module, learning_rate=RATE))
    return LocalLearner(
        made.model,
        adamw(made.model, learning_rate=RATE, weight_decay=0.1),
        save=functools.partial(save_policy, made),
        reference=Reference(),
        critic=critic,
        **options,
    )


def base_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if ".adapter." not in name}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("kind", ["none", "separate", "shared"])
def test_only_adapters_learn_and_the_reference_is_the_base(kind: str, tmp_path: Path) -> None:
    """Bit for bit the base, before and after steps, by the trained model itself."""
    made = policy(tmp_path, dtype=torch.float64)
    student, given = learner(made, kind), batch()
    before = base_of(made.model)
    plain = LocalLearner(small_model(), adamw(small_model(), learning_rate=1.0), save=print)
    expected = plain.infer(given).need("old_logprobs")
    assert torch.equal(student.infer(given).need("old_logprobs"), expected)
    for _ in range(3):
        student.step(student.infer(given), objective)
    seen = student.infer(given)
    assert torch.equal(seen.need("ref_logprobs"), expected)
    assert float((seen.need("old_logprobs") - expected).abs().max()) > 1e-3
    after = base_of(made.model)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    named = dict(made.model.named_parameters())
    assert student.weights().keys() == {name for name in named if ".adapter." in name}
    student.refresh_reference()
    again = student.infer(given)
    assert torch.equal(again.need("ref_logprobs"), again.need("old_logprobs"))


def test_a_critic_of_its_own_shares_the_base(tmp_path: Path) -> None:
    """And not the adapters: a step of the critic alone leaves the policy as it is."""
    made = policy(tmp_path)
    student, given = learner(made, "separate"), batch()
    assert student.critic is not None
    own = {w.data_ptr() for w in made.model.parameters() if not w.requires_grad}
    held = {w.data_ptr() for w in student.critic.module.parameters() if not w.requires_grad}
    assert held <= own
    before = student.infer(given)
    alone = Objective(lambda outputs, part: squared(outputs.need("values"), part), only_critic=True)
    student.step(before, alone)
    after = student.infer(given)
    assert torch.equal(after.need("old_logprobs"), before.need("old_logprobs"))
    assert not torch.equal(after.need("values"), before.need("values"))


@pytest.mark.parametrize("kind", ["none", "separate", "shared"])
def test_a_checkpoint_holds_the_adapter_alone_and_comes_back_bit_for_bit(
    kind: str, tmp_path: Path
) -> None:
    student = learner(policy(tmp_path), kind)
    for _ in range(2):
        student.step(student.infer(batch()), objective)
    student.refresh_reference()
    student.step(student.infer(batch()), objective)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    numbers = json.loads(json.dumps(save_learner(student, folder)))
    assert not (folder / "weights.safetensors").exists()  # they are in model/ as they are
    adapter = 4 * sum(weight.numel() for weight in student.weights().values())
    files = {path.name: path.stat().st_size for path in folder.rglob("*.safetensors")}
    assert files["adapter_model.safetensors"] < 1.5 * adapter + 4096
    assert sum(files.values()) < 8 * adapter + 2**15  # moments, reference, critic with its own
    other = learner(policy(tmp_path), kind)
    load_learner(other, folder, numbers=numbers)
    for one in (student, other):
        one.step(one.infer(batch()), objective)
    first, second = student.infer(batch()), other.infer(batch())
    for name in ("old_logprobs", "ref_logprobs", *(["values"] if kind != "none" else [])):
        assert torch.equal(first.need(name), second.need(name))
    mine, theirs = student.weights(), other.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


PROMPTS = [Prompt(id=str(n), text="", tokens=tuple(range(5 + n, 9 + 2 * n))) for n in range(3)]


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("ahead", [False, True])
def test_sampler_and_learner_agree_after_steps(
    compute: torch.dtype | None, ahead: bool, tmp_path: Path
) -> None:
    """The engine samples by slots, and by casts of the weights where it computes in bfloat16."""
    made = policy(tmp_path)
    if compute is not None:
        round_base(made.model, compute)
    student = learner(made, compute=compute or torch.float32)
    sampled = copy_of_trained(made.model) if ahead else made.model
    engine = NativeEngine(sampled, end_tokens=[3], decode=str, compute=compute)
    sync = engine.sync(student)
    sampling = Sampling(max_new_tokens=12)
    worst = []
    for version in range(3):
        groups = engine.generate(PROMPTS, sampling, num_samples=4, seed=version)
        rollouts = [
            replace(rollout, score=Score(value=0.0)) for group in groups for rollout in group
        ]
        seen = student.infer(collate(rollouts, pad_token=0))
        gap = (seen.need("sampler_logprobs") - seen.need("old_logprobs")).abs() * seen.mask
        worst.append(float(gap.max()))
        reference = (seen.need("ref_logprobs") - seen.need("old_logprobs")).abs().max()
        assert (float(reference) > 0.1) == (version > 0)  # it has moved far since
        for _ in range(4):
            student.step(student.infer(batch()), objective)
        sync(version + 1)
    assert max(worst) < (1e-4 if compute is None else 0.05)


def test_no_way_is_lost(tmp_path: Path) -> None:
    made, plain = policy(tmp_path), small_model(dtype=torch.float32)
    ways = [
        (
            NativeEngine(model, end_tokens=[3], decode=str).way(),
            LocalLearner(model, adamw(model, learning_rate=RATE), save=print).way(32),
        )
        for model in (made.model, plain)
    ]
    assert ways[0] == ways[1]
    assert not any(way.without for way in ways[0])


@pytest.mark.usefixtures("float64_throughout")
def test_packed_passes_score_like_naive_ones(tmp_path: Path) -> None:
    made = policy(tmp_path, dtype=torch.float64)
    student = learner(made)
    student.step(student.infer(batch()), objective)
    with torch.no_grad():
        expected = naive_logprobs(made.model, batch())
        found = score_tokens(made.model, batch()).need("logprobs")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_adapters_are_compiled_in_one_piece(tmp_path: Path) -> None:
    """Under autocast too: no graph break, and none at the next batch size."""
    layer = policy(tmp_path).model.model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        states = torch.randn(rows, 7, layer.in_features)
        assert torch.equal(compiled(states), layer(states))
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            assert torch.equal(compiled(states), layer(states))
