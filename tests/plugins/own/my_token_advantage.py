"""An advantage for each token, without a critic: what is still to come, less the batch's mean."""

from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(needs={"token_rewards"})
def to_come(batch: Batch, *, scale: float = 1.0) -> Batch:
    left = batch.need("token_rewards").flip(1).cumsum(1).flip(1)
    mean = left[batch.active].mean()
    return batch.replace(advantages=scale * (left - mean) * batch.active)
