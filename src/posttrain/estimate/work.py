"""What is asked for: the sizes of a step of [rl], and how its parts are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from posttrain.data.minibatch import micro_batches
from posttrain.learn.optim import Moments
from posttrain.models.adapters import AdapterSettings
from posttrain.models.frozen import Reference
from posttrain.types import Batch


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
        prompts = -(-self.prompts // self.minibatches)
        asked = torch.arange(prompts)[:, None].expand(-1, self.longest)
        tokens = asked.repeat_interleave(self.group, 0)
        mask = (torch.arange(self.longest) >= self.prompt_tokens).expand(tokens.shape)
        weights = mask.float()
        batch = Batch(tokens=tokens, mask=mask, attention=torch.ones_like(mask), weights=weights)
        parts = []
        for rows, _ in micro_batches(batch, max_tokens, share_prompts=True):
            read = len(set((rows // self.group).tolist())) * self.prompt_tokens
            read += len(rows) * (self.new_tokens - 1)  # no layer reads the last token
            parts.append(MicroBatch(read, len(rows) * self.new_tokens))
        return max(parts)
