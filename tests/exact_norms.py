"""Norms that compute in the type of their weights, for tests to more digits than float32 has."""

from torch import Tensor, nn


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self._offset = norm.weight, float("Gemma" in type(norm).__name__)
        self._epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, given: Tensor) -> Tensor:
        size = (given.square().mean(-1, keepdim=True) + self._epsilon).rsqrt()
        return given * size * (self.weight + self._offset)


def with_exact_norms(model: nn.Module) -> nn.Module:
    """The same model, changed: its root-mean-square norms no longer round to float32.

    Such a norm rounds the gradient of every token. A token that stands for several sequences sums
    their gradients first, so it is rounded once, not once for each: equal but for float32.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _Norm(child))
    return model
