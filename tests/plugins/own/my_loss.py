"""A loss that is no multiple of the advantage: the clip, and every token a little less likely."""

from torch import Tensor

from posttrain.algorithms.losses import clipped
from posttrain.types import Batch, Terms

SEEN: list[Batch] = []


def hesitant(logprobs: Tensor, batch: Batch, *, strength: float = 0.1) -> Terms:
    SEEN.append(batch)
    terms = clipped(logprobs, batch)
    return Terms(loss=terms.loss + strength * logprobs * batch.active, means=terms.means)
