"""An advantage that is given a critic: what it did not expect of the whole sequence."""

from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(needs={"token_rewards", "values"})
def surprise(batch: Batch) -> Batch:
    returns = batch.need("token_rewards").sum(1, keepdim=True) * batch.active
    return batch.replace(advantages=returns - batch.need("values") * batch.active, returns=returns)
