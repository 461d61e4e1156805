"""What is asked for, by hand or by a recipe: the sizes of a step of [rl] and how parts are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from posttrain.build.learners import make_reference
from posttrain.build.sampler import SAME_PROCESS
from posttrain.build.setup import choose_compile, choose_compute
from posttrain.config import Resolved
from posttrain.data.minibatch import cut
from posttrain.learn.optim import Moments
from posttrain.models.adapters import AdapterSettings
from posttrain.models.frozen import Reference
from posttrain.models.outline import find_config
from posttrain.registry import split
from posttrain.types.batch import TokenSpans


class MicroBatch(NamedTuple):
    """A micro-batch: tokens that the layers read, and tokens that are scored."""

    read: int
    chosen: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of reinforcement learning, at its longest: every completion is as long as may be.

    ``config`` and ``teacher`` are configurations of transformers. ``sequences_at_once`` is the
    engine's limit, where it has one; ``samples_here`` is False where another process samples.
    ``traced`` remembers what was counted of passes, for whatever is like this.
    """

    config: Any
    dtype: str = "float32"
    device: Literal["cuda", "cpu"] = "cuda"
    compute: torch.dtype = torch.bfloat16
    compiled: bool = False
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 256
    minibatches: int = 1
    epochs: int = 1
    max_lag: int = 0
    micro_batch_tokens: int | Literal["auto"] = "auto"
    adapter: AdapterSettings | None = None
    moments: Moments = "full"
    checkpointed: bool = False
    reference: Reference | None = None
    critic: Literal["separate", "shared"] | None = None
    teacher: Any = None
    teacher_dtype: str = "float32"
    samples_here: bool = True
    sequences_at_once: int | None = None
    memory: float = 0.0  # bytes of the device; footprint sets it
    traced: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def captured(self) -> bool:
        """Whether passes that learn are replayed from CUDA graphs."""
        return self.compiled and self.device == "cuda" and not self.checkpointed

    @property
    def sequences(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    @property
    def longest(self) -> int:
        """Tokens of a prompt with a completion."""
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens(self) -> int:
        """Tokens of an optimiser step: a prompt once for all its completions."""
        whole = self.prompts * self.prompt_tokens + self.sequences * self.new_tokens
        return -(-whole // self.minibatches)

    @property
    def keys(self) -> float:
        """Keys that are gathered for each token; more than eight are not worth the copy."""
        read = self.prompt_tokens + self.group * self.new_tokens
        return min(8.0, (self.prompt_tokens + self.group * self.longest) / read)

    def fullest(self, max_tokens: int) -> MicroBatch:
        """The largest micro-batch of at most so many tokens, cut as a learner cuts its batches."""
        size = -(-self.prompts // self.minibatches) * self.group
        groups = [list(range(at, at + self.group)) for at in range(0, size, self.group)]
        owner = [rows[0] for rows in groups for _ in rows]
        ends = [self.longest] * size
        found = TokenSpans(first=[self.prompt_tokens] * size, end=ends, owner=owner)
        parts = []
        for rows in cut(groups, ends, found=found, max_tokens=max_tokens):
            read = len({owner[row] for row in rows}) * self.prompt_tokens
            read += len(rows) * (self.new_tokens - 1)  # no layer reads the last token
            parts.append(MicroBatch(read, len(rows) * self.new_tokens))
        return max(parts)


def work_of(
    recipe: Resolved,
    *,
    device: Literal["cuda", "cpu"],
    prompt_tokens: int,
    shape: Mapping[str, Any] | None = None,
    like: Work | None = None,
) -> Work:
    """The work of a step of [rl] on one device; ``shape`` are the sizes of an absent model.

    What ``like``, work of the same model, knows of it already is not looked up again.
    """
    rl, model = recipe.rl, recipe.model
    engine, options = split(rl.engine or "native", kind="engine")
    elsewhere = recipe.cluster is not None and recipe.cluster.engines > 0
    teacher = recipe.teacher.model if recipe.teacher is not None else ""
    return Work(
        config=like.config if like else find_config(model.name, options=model.options, shape=shape),
        dtype=model.dtype,
        device=device,
        compute=choose_compute(model, device) if device == "cuda" else torch.float32,
        compiled=choose_compile(recipe, device),
        prompts=rl.prompts_per_step,
        group=rl.group_size,
        prompt_tokens=prompt_tokens,
        new_tokens=rl.max_new_tokens,
        minibatches=rl.minibatches,
        epochs=rl.epochs,
        max_lag=rl.max_lag,
        micro_batch_tokens=rl.micro_batch_tokens,
        adapter=AdapterSettings(**dict(recipe.adapter)) if recipe.adapter.rank else None,
        moments=rl.adam_moments,
        checkpointed=rl.checkpoint_activations,
        reference=make_reference(rl.kl),
        critic=None if rl.critic is None else rl.critic.kind,
        teacher=find_config(teacher) if teacher else None,
        teacher_dtype=recipe.teacher.dtype if recipe.teacher is not None else "float32",
        samples_here=engine in SAME_PROCESS and not elsewhere,
        sequences_at_once=options.get("max_sequences"),
        traced=like.traced if like else {},
    )
