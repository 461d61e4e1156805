"""Options that recipes choose by name, apart from the mathematics, so that torch is not needed."""

from __future__ import annotations

from typing import Literal

Estimator = Literal["k1", "k2", "k3"]
Direction = Literal["reverse", "forward"]
Rule = Literal["fixed", "proportional", "doubling"]
Placement = Literal["none", "loss", "reward"]

# The expected gradient of a KL penalty in the loss at π = π_old, by estimator and direction:
# without and with the weight ρ.
GRADIENTS: dict[tuple[Estimator, Direction], tuple[str, str]] = {
    ("k1", "reverse"): ("0: noise alone", "∇ KL(π ‖ π_ref)"),
    ("k2", "reverse"): ("∇ KL(π ‖ π_ref)", "∇ ½ E_π[d²]"),
    ("k3", "reverse"): ("∇ KL(π_ref ‖ π)", "∇ KL(π ‖ π_ref)"),
    ("k1", "forward"): ("∇ {KL(π_ref ‖ π) + ½ E_ref[d²]}", "∇ KL(π_ref ‖ π)"),
    ("k2", "forward"): ("∇ KL(π ‖ π_ref)", "∇ ½ E_π[d²]"),
    ("k3", "forward"): ("∇ ½ E_ref[d²]", "∇ KL(π_ref ‖ π)"),
}
