"""The memory of a run, part by part: the parts are made on the meta device, and counted."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.estimate.work import MicroBatch, Work
from posttrain.fast.decode import PREFILL_TOKENS, CastCopy, capacity_for, fuses_frozen, most_slots
from posttrain.fast.pass_memory import Aliases, PassMemory, id_of, pass_memory, scoring_bytes
from posttrain.fast.score import checkpoint_activations
from posttrain.learn.micro_batch_size import TRIED, Memory, fitting_tokens, tokens_on_cpu
from posttrain.learn.optim import moment_bytes
from posttrain.models.adapters import adapted_layers, add_adapters, copy_of_trained, round_base
from posttrain.models.frozen import Frozen
from posttrain.models.gpu_memory import CPU_BYTES
from posttrain.models.head import HALF
from posttrain.models.outline import outline

# Workspaces of matrix products and blocks that PyTorch rounds up: what H200 runs take beyond the
# tensors (docs/memory.md). The context of the driver is outside of what PyTorch counts.
LIBRARIES, CONTEXT = 0.1 * 2**30, 0.5 * 2**30
# Not there yet when the KV cache is made, before the first step.
LATER = ("gradients", "AdamW", "learner's cast weights")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a run: what ``stays``, what comes in each phase, and the sizes that follow.

    ``stays`` is there in every phase. ``sampling``, ``asking`` (log-probs without gradient, of the
    reference too) and ``learning`` come on top of it, one at a time.
    """

    stays: dict[str, float]
    sampling: dict[str, float]
    asking: dict[str, float]
    learning: dict[str, float]
    micro_batch_tokens: int
    most_tokens: int
    slots: int
    trained: int
    weights: int

    @property
    def peaks(self) -> dict[str, float]:
        """The most bytes of each phase."""
        base = sum(self.stays.values())
        phases = ("sampling", "asking", "learning")
        return {phase: base + sum(getattr(self, phase).values()) for phase in phases}

    @property
    def peak(self) -> float:
        """The most bytes of all."""
        return max(self.peaks.values())


def footprint(work: Work, memory: float) -> Footprint:
    """The memory of a run on a device that has ``memory`` bytes for it."""
    usable = memory - (CONTEXT if work.device == "cuda" else 0)
    work = replace(work, memory=memory)
    model = make_model(work)
    with torch.device("meta"):
        stays = _staying(work, model, memory=usable)
    passes = _passes(work)
    before = sum(size for name, size in stays.items() if not name.endswith(LATER))
    slots, cache = _cache(work, model, free=usable - before)
    stays |= {"KV cache": cache} if cache else {}
    taken = functools.partial(_learning, work, model, passes=passes)
    free = usable - sum(stays.values())
    most = _most(lambda count: sum(taken(part=MicroBatch(count, count)).values()), free)
    asked = work.micro_batch_tokens
    if asked == "auto":
        asked = _auto(work, model, free=free, passes=passes)
        while asked > max(most, TRIED[0]):  # a learner that runs out of memory halves them
            asked //= 2
    part = work.fullest(asked)
    learning = taken(part=part)
    if work.device == "cuda":  # once captured, graphs keep their memory
        steps = _rows(model, slots) + passes.asked.each * slots
        stays["CUDA graphs"] = learning.pop("CUDA graphs", 0.0) + steps
    return Footprint(
        stays=stays,
        sampling=_sampling(work, model, passes=passes, slots=slots),
        asking=_asking(work, model, passes=passes, part=part),
        learning=learning,
        micro_batch_tokens=asked,
        most_tokens=most,
        slots=slots,
        trained=sum(w.numel() for w in model.parameters() if w.requires_grad),
        weights=sum(w.numel() for w in model.parameters()),
    )


def make_model(work: Work) -> Any:
    """The policy as it is built, without numbers."""
    with torch.device("meta"):
        return _made(work)


def _made(work: Work, layers: int | None = None) -> Any:
    model = outline(work.config, dtype=work.dtype, layers=layers)
    if work.adapter is not None and work.adapter.rank:
        add_adapters(model, work.adapter, seed=0)
        if work.compute in HALF:
            round_base(model, work.compute)
    checkpoint_activations(model, enabled=work.checkpointed)
    return model


def _staying(work: Work, model: Any, *, memory: float) -> dict[str, float]:
    """What is there from the first step to the last, on the device."""
    trained = [w for w in model.parameters() if w.requires_grad]
    found: dict[str, float] = {
        "weights": _size(model.parameters()),
        "gradients": _size(trained),
        "AdamW": moment_bytes(trained, work.moments),
    }
    if work.reference is not None:
        found["reference"] = 0.0 if work.reference.offload else reference_bytes(work, model)
    if work.critic == "separate":
        critic = copy_of_trained(model.get_decoder())
        learns = [w for w in critic.parameters() if w.requires_grad]
        found["critic"] = _new(critic, beside=model)
        found["critic's gradients"] = _size(learns)
        found["critic's AdamW"] = moment_bytes(learns, work.moments)
    if work.captured and work.compute in HALF:
        found["learner's cast weights"] = _aliases(model, work) * (1 + (work.critic == "separate"))
    if work.teacher is not None:
        found["teacher"] = _size(outline(work.teacher, dtype=work.teacher_dtype).parameters())
    if work.samples_here:
        own = copy_of_trained(model) if work.max_lag else model
        if work.max_lag:
            found["engine's weights"] = _new(own, beside=model)
        if work.compute in HALF and model.dtype not in HALF:
            free = memory - sum(size for name, size in found.items() if not name.endswith(LATER))
            fuse = fuses_frozen(own, work.compute, free=free)
            copied = CastCopy(own, work.compute, fuse_frozen=fuse).model
            found["engine's cast weights"] = _new(copied, beside=own)
    if work.device == "cuda":
        found["libraries"] = LIBRARIES
    return {name: size for name, size in found.items() if size}


def reference_bytes(work: Work, model: Any) -> float:
    """A copy of the weights, or of the adapters alone."""
    if adapted_layers(model):
        return _size(w for name, w in model.named_parameters() if ".adapter." in name)
    assert work.reference is not None
    dtype = work.reference.dtype
    return _size(Frozen.copy_of(model, dtype=dtype).weights().values())


def _aliases(model: Any, work: Work) -> float:
    """The weights that captured passes keep cast."""
    own = {id_of(weight) for weight in model.parameters()}
    named = Aliases(model.get_decoder(), work.compute).named
    return _size(w for w in named.values() if id_of(w) not in own)


def _passes(work: Work) -> PassMemory:
    """What passes take: it depends on few of the settings, and is counted once for each of them."""
    kept = (work.adapter, work.dtype, work.checkpointed)
    key = (*kept, work.compiled, work.compute, work.keys, work.device)
    if key not in work.traced:
        work.traced[key] = pass_memory(
            functools.partial(_made, work),
            work.config.get_text_config().num_hidden_layers,
            compute=work.compute,
            device=work.device,
            keys=work.keys,
            compiled=work.compiled and not work.checkpointed,  # else layers keep their inputs alone
            cast_before=work.captured,
        )
    return work.traced[key]


def _cache(work: Work, model: Any, *, free: float) -> tuple[int, float]:
    """How many sequences are decoded at once, and the bytes of their keys and values."""
    if not work.samples_here:
        return 0, 0.0
    dtype = work.compute if work.compute in HALF else model.dtype
    budget = max(0.0, free / 2) if work.device == "cuda" else CPU_BYTES
    most = work.sequences_at_once or most_slots(model, work.longest, dtype=dtype, budget=budget)
    capacity = capacity_for(
        sequences=work.sequences,
        distinct=work.prompts,
        longest=work.prompt_tokens,
        new_tokens=work.new_tokens,
        most=most,
    )
    return capacity.num_slots, float(capacity.num_bytes(model, dtype))


def _learning(work: Work, model: Any, *, passes: PassMemory, part: MicroBatch) -> dict[str, float]:
    """Forward and backward of a micro-batch; the policy's and a critic's are there together."""
    trunks = 1 + (work.critic == "separate")
    width = model.config.get_text_config().hidden_size
    scoring = _scoring(work, model, part=part, gradient=True)
    kept, passing = trunks * passes.kept(part.read), passes.passing(part.read)
    states = 4 * part.read * width * trunks
    if work.captured:
        return {"CUDA graphs": kept + trunks * passing, "states": 2 * states, "logits": scoring}
    # Logits are gone before the layers' own gradients are computed.
    return {"activations": kept, "states": states, "logits or gradients": max(scoring, passing)}


def _scoring(work: Work, model: Any, *, part: MicroBatch, gradient: bool) -> float:
    return scoring_bytes(
        part.chosen,
        head=model.get_output_embeddings().weight,
        compute=work.compute,
        gradient=gradient,
        device=work.device,
        memory=work.memory,
    )


def _asking(work: Work, model: Any, *, passes: PassMemory, part: MicroBatch) -> dict[str, float]:
    """Log-probs without gradient; a reference that rests in main memory is brought in."""
    if work.reference is None and work.critic is None and work.teacher is None:
        return {}  # only the policy is asked, where at all: less than it takes to learn
    moved = work.reference is not None and work.reference.offload
    with torch.device("meta"):
        reference = reference_bytes(work, model) if moved else 0.0
    found = {
        "reference": 0.0 if adapted_layers(model) else reference,
        "activations": passes.asked(part.read),
        "logits": _scoring(work, model, part=part, gradient=False),
    }
    return {name: size for name, size in found.items() if size}


def _sampling(work: Work, model: Any, *, passes: PassMemory, slots: int) -> dict[str, float]:
    """Prompts are read in passes of their own; then a row of logits of each slot is drawn from."""
    if not work.samples_here:
        return {}
    tokens = min(work.prompts * work.prompt_tokens, PREFILL_TOKENS)
    return {"prompts or logits": max(passes.asked.each * tokens, _rows(model, slots))}


def _rows(model: Any, slots: int) -> float:
    """Logits of a row of each slot, in float32."""
    return 4.0 * model.config.get_text_config().vocab_size * slots


def _auto(work: Work, model: Any, *, free: float, passes: PassMemory) -> int:
    """Tokens that a learner would take by itself: it tries the same two sizes and computes so."""
    if work.device == "cpu":
        return tokens_on_cpu(model.config.get_text_config().hidden_size)
    plain = replace(work, compiled=False)  # what is tried is not captured
    tried = functools.partial(_learning, plain, model, passes=passes)
    points = [(count, int(sum(tried(part=MicroBatch(count, count)).values()))) for count in TRIED]
    return fitting_tokens(Memory.through(*points), free, replayed=work.captured)


def _most(taken: Any, free: float) -> int:
    """The most tokens of a micro-batch, in steps of 256, that take no more than what is free."""
    low, high = 0, 2**14
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(256 * middle) <= free else (low, middle - 1)
    return 256 * low


def _size(weights: Iterable[Tensor]) -> float:
    """Bytes of tensors, each storage once."""
    return float(sum({id_of(w): w.untyped_storage().nbytes() for w in weights}.values()))


def _new(module: nn.Module, *, beside: nn.Module) -> float:
    """Bytes of a module that another does not hold already."""
    own = {id_of(weight) for weight in beside.parameters()}
    return _size(w for w in module.parameters() if id_of(w) not in own)
