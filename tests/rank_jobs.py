"""What the ranks of a learner are asked in tests; one rank alone does the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import critic_parts
import torch
from exact_arithmetic import float64_throughout
from rank_pool import pool
from small_model import OPTIONS, small_model
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from posttrain.algorithms.advantages import towards_teacher
from posttrain.algorithms.losses import DIRECT_LOSSES
from posttrain.algorithms.losses.policy import clipped, unclipped
from posttrain.algorithms.objective import with_kl
from posttrain.algorithms.weights import sequence_mean
from posttrain.data.collate import collate_demonstrations, collate_ranked
from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.torchrun import TorchrunLearner
from posttrain.distributed.worker import LearnerHost
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.ranks import Ranks
from posttrain.learn.trained import Trained
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy, load_policy
from posttrain.models.reward import reward_from_policy, save_reward, scores
from posttrain.models.save import save_policy, with_adapters
from posttrain.pipelines.direct_preference import Preferences, num_tokens, objective
from posttrain.pipelines.likelihood import likelihood
from posttrain.pipelines.reward_model import RankedTokens, preference
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

LENGTHS = (9, 4, 6, 12, 5, 7, 3, 8)  # of sequences; two and two have the same prompt
FREE = 1e9  # a gradient norm that is never reached


def grpo_terms(outputs: Outputs, part: Batch) -> Terms:
    """GRPO's: the clipped loss and a KL to the reference."""
    terms = clipped(outputs.need("logprobs"), part)
    return with_kl(terms, outputs.need("logprobs"), batch=part, coefficient=0.3)


def distill_terms(outputs: Outputs, part: Batch) -> Terms:
    """On-policy distillation's: the teacher's log-probs decide the advantages."""
    return unclipped(outputs.need("logprobs"), towards_teacher(part))


OBJECTIVES = {
    "sft": likelihood,
    "reward": preference,
    "dpo": objective(functools.partial(DIRECT_LOSSES["dpo"], beta=0.5)),
    "grpo": Objective(grpo_terms),
    "ppo": critic_parts.objective,
    "ppo shared": critic_parts.objective,
    "tied": likelihood,
    "distill": Objective(distill_terms),
    "critic alone": critic_parts.value_objective,
    "critic alone shared": critic_parts.value_objective,
}
# The same with adapters, which are all that learns.
ADAPTED = ("sft", "reward", "dpo", "grpo", "ppo")
OBJECTIVES |= {f"{kind} adapter": OBJECTIVES[kind] for kind in ADAPTED}


OBJECTIVES_ON_GPU = {**OBJECTIVES, "grpo offloaded": OBJECTIVES["grpo"]}
WITH_REFERENCE = ("grpo", "ppo", "grpo offloaded", "grpo adapter", "ppo adapter")
WITHOUT_INFERENCE = ("sft", "reward", "dpo", "tied", "sft adapter", "reward adapter", "dpo adapter")
EXACT = ("reward", "dpo", "grpo", "ppo", "distill", "ppo adapter")  # float64 throughout is slow


def batch(kind: str) -> Batch:
    """Eight sequences of many lengths; one of them has no weight, and one is not valid."""
    if "reward" in kind:
        sets = [
            (((5, 6, 7), (5, 8), (5, 9, 10, 11)), 0.1),
            (((7, 6), (7, 8, 9)), 0.0),
            (((11, 6, 7, 8, 9), (11, 3)), 0.2),
            (((4, 3, 2), (4, 1, 2)), 0.0),
        ]
        return collate_ranked(sets, pad_token=0)
    if "dpo" in kind:
        rows_of = [((5, 6, 7), (5, 8)), ((7, 6, 2), (7, 8, 9), (7, 4)), ((11, 6, 7, 8), (11, 3))]
        ranked = [RankedTokens(rows=rows, lengths=(), start=1) for rows in rows_of]
        kept = [-torch.arange(1.0, 1 + num_tokens(member)) for member in ranked]
        return Preferences(sets=ranked, pad_token=0, reference=kept).batch(range(3))
    rows = []
    for number, length in enumerate(LENGTHS):
        tokens = [20 + number // 2, 30, *(5 + (7 * number + place) % 40 for place in range(length))]
        rows.append((tokens, [place > 1 for place in range(length + 2)]))
    made = collate_demonstrations(rows, pad_token=0)
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(2, *made.tokens.shape, generator=generator, dtype=torch.float64)
    numbers = numbers * made.mask
    made = made.replace(
        groups=torch.arange(len(LENGTHS)) // 2,
        rewards=numbers[0, :, 2],
        advantages=numbers[0],
        returns=numbers[1],
        valid=torch.arange(len(LENGTHS)) != 4,
    )
    weighted = sequence_mean(made)
    weights = weighted.need("weights").clone()
    weights[6] = 0.0  # this one only gets a forward pass
    return weighted.replace(weights=weights)


def adapted(owner: Policy) -> Policy:
    """The policy with adapters that say something: a new B is 0, and gives A no gradient."""
    made = with_adapters(owner, {"rank": 3}, seed=0, folder=Path("none"))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if name.endswith(".adapter.B"):
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return made


def learner(
    kind: str, ranks: Ranks, *, dtype: torch.dtype, device: str = "cpu", **options: Any
) -> LocalLearner:
    """A learner of a small model, with whatever this kind of learning needs."""
    own = small_model(dtype=dtype).to(device)
    owner = replace(load_policy("tiny", options=OPTIONS), model=own)
    if "adapter" in kind:
        owner = adapted(owner)
    model: Any = owner.model
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    save: Any = functools.partial(save_policy, owner)
    critic = None
    if "reward" in kind:
        reward = reward_from_policy(owner, seed=0)
        model, save = reward.model, functools.partial(save_reward, reward)
        options |= {"forward": scores, "keep_groups": True}
    elif "dpo" in kind:
        options |= {"keep_groups": True}
    elif "ppo" in kind or "critic" in kind:
        value = (shared_critic if "shared" in kind else separate_critic)(owner)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for weight in value.head.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
        critic = Trained(value, adamw(value, learning_rate=5e-3), max_gradient_norm=FREE)
    return LocalLearner(
        model,
        adamw(model, learning_rate=1e-3, weight_decay=0.1),
        **{"save": save, "max_gradient_norm": FREE, "micro_batch_tokens": 24, **options},
        schedule=lambda step: 1 / (step + 1),
        reference=Reference(offload="offloaded" in kind) if kind in WITH_REFERENCE else None,
        critic=critic,
        teacher=small_model(sharpness=3.0, dtype=dtype).to(device) if kind == "distill" else None,
        ranks=ranks,
    )


def whole(tensor: Tensor) -> Tensor:
    """A tensor of all ranks; on a GPU not by ``full_tensor``, which crashes there over gloo."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    if tensor.device.type == "cpu":
        return tensor.full_tensor().detach().clone()
    (placement,) = tensor.placements
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, tensor.to_local().detach().cpu())
    return torch.cat(parts, placement.dim) if placement.is_shard() else parts[0]


def gradients(student: LocalLearner) -> dict[str, Tensor]:
    """The gradient of the last step, of policy and critic."""
    modules = {"policy": student.model}
    if student.critic is not None:
        modules["critic"] = student.critic.module
    return {
        f"{part} {name}": whole(weight.grad)
        for part, module in modules.items()
        for name, weight in module.named_parameters()
        if weight.grad is not None
    }


def learned(ranks: Ranks, kind: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Two steps on one batch: the gradients of both, what was inferred, and what was told."""
    exact = float64_throughout() if dtype == torch.float64 else contextlib.nullcontext()
    with exact:
        student = learner(kind, ranks, dtype=dtype, **options)
        given = batch(kind) if kind in WITHOUT_INFERENCE else student.infer(batch(kind))
        told: dict[str, Any] = {"results": [], "gradients": []}
        for _ in range(2):
            told["results"].append(student.step(given, OBJECTIVES_ON_GPU[kind]))
            told["gradients"].append(gradients(student))
    names = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
    return {**told, "inferred": {name: getattr(given, name) for name in names}}


def all_learned(ranks: Ranks) -> dict[tuple[str, torch.dtype], dict[str, Any]]:
    """What every kind of learning comes to in float32, and some of them in float64."""
    exact = EXACT if ranks.size == 3 else ()
    asked = [(kind, torch.float32) for kind in OBJECTIVES]
    asked += [(kind, torch.float64) for kind in exact]
    return {(kind, dtype): learned(ranks, kind, dtype) for kind, dtype in asked}


def on_gpu(ranks: Ranks, kind: str, compute: torch.dtype) -> dict[str, Any]:
    """The same on a GPU, which all ranks share, with micro-batches as large as fit."""
    options: dict[str, Any] = {"device": "cuda", "compute": compute, "micro_batch_tokens": "auto"}
    return learned(ranks, kind, torch.float32, **options)


def steps(student: LocalLearner, kind: str) -> dict[str, Any]:
    """What two more steps show."""
    told: list[Any] = []
    for _ in range(2):
        given = batch(kind) if kind in WITHOUT_INFERENCE else student.infer(batch(kind))
        names = ("old_logprobs", "ref_logprobs", "values")
        seen = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        told.append((student.step(given, OBJECTIVES[kind]), seen))
    modules = [student.model, *([] if student.critic is None else [student.critic.module])]
    weights = [whole(weight) for module in modules for weight in module.parameters()]
    return {"told": told, "weights": weights, "version": student.version}


def written(ranks: Ranks, kind: str, folder: str) -> dict[str, Any]:
    """A learner after two steps and with a new reference, in a folder; and two steps more."""
    student = learner(kind, ranks, dtype=torch.float64)
    steps(student, kind)
    student.version = 3
    if student.reference is not None:
        student.refresh_reference()
    numbers = student.state(Path(folder))
    return {"numbers": numbers, **steps(student, kind)}


def read(ranks: Ranks, kind: str, folder: str, numbers: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a new learner that was restored from a folder."""
    student = learner(kind, ranks, dtype=torch.float64)
    student.restore(Path(folder), numbers)
    return steps(student, kind)


def out_of_memory(
    ranks: Ranks, kind: str, where: str, tokens: int, **options: Any
) -> dict[str, Any]:
    """Steps during which the last of several ranks runs out of memory once, in the middle."""
    raised: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        student = learner(kind, ranks, dtype=torch.float64, micro_batch_tokens=tokens, **options)

        def fail(*called: Any) -> None:
            if ranks.rank == ranks.size - 1 > 0 and not raised:
                raised.append(where)
                raise torch.OutOfMemoryError("injected")

        model: Any = student.model
        layers = model.get_decoder().layers
        if where == "forward":
            layers[1].mlp.register_forward_pre_hook(fail)
        elif where == "backward":
            layers[0].mlp.register_full_backward_hook(fail)
        else:
            critic: Any = student.critic
            critic.module.trunk.layers[1].mlp.register_full_backward_hook(fail)
        told = steps(student, kind)
    return {**told, "tokens": student.micro_batch_tokens, "raised": raised}


def out_of_memory_on_gpu(ranks: Ranks, kind: str, where: str, tokens: int) -> dict[str, Any]:
    """The same on a GPU, which all ranks share."""
    return out_of_memory(ranks, kind, where, tokens, device="cuda")


def skipped(ranks: Ranks, kind: str) -> dict[str, Any]:
    """A step whose loss is infinite in one sequence, so in one rank, and two ordinary ones."""
    student = learner(kind, ranks, dtype=torch.float64)
    before = steps(student, kind)
    given = batch(kind) if kind in WITHOUT_INFERENCE else student.infer(batch(kind))
    advantages = given.need("advantages").clone()
    advantages[3, 2] = math.inf
    result = student.step(given.replace(advantages=advantages), OBJECTIVES[kind])
    modules = [student.model, *([] if student.critic is None else [student.critic.module])]
    after = [whole(weight) for module in modules for weight in module.parameters()]
    same = all(map(torch.equal, before["weights"], after))
    return {"skipped": result.skipped, "same": same, **steps(student, kind)}


@dataclass(frozen=True)
class SmallRequest:
    """Stands in for a ``LearnerRequest``: a policy in float64 with a critic and a reference."""

    here: str = ""
    modules: tuple[str, ...] = ()

    def make(self, ranks: Ranks) -> LocalLearner:
        return learner("ppo", ranks, dtype=torch.float64)


_hosts: dict[int, LearnerHost] = {}


def hosted(ranks: Ranks, number: int) -> None:
    """Build this rank's part of a learner, as host of that number."""
    request: Any = SmallRequest()
    _hosts[number] = LearnerHost(ranks)
    _hosts[number].build(request)


def asked(ranks: Ranks, number: int, call: LearnerCall) -> Any:
    """What a host answers; all ranks answer the same, and the first says it."""
    return _hosts[number].answer(call)


class TwoRanks:
    """The ranks of a learner in two other processes."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        pool().call(2, hosted, self._number)

    def call(self, call: LearnerCall) -> Any:
        return pool().call(2, asked, self._number, call)[0]

    def end(self) -> None:
        pass


_numbers = itertools.count()


def over_two_ranks() -> TorchrunLearner:
    """A learner over two ranks, asked as torchrun's are."""
    own = replace(load_policy("tiny", options=OPTIONS), model=small_model())
    return TorchrunLearner(
        TwoRanks, model=own.model, save=functools.partial(save_policy, own), scratch=Path()
    )
