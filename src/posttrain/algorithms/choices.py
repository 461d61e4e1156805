"""What can be chosen by a word, apart from the mathematics: a recipe knows it without torch."""

from __future__ import annotations

from typing import Literal

Estimator = Literal["k1", "k2", "k3"]
Direction = Literal["reverse", "forward"]
Rule = Literal["fixed", "proportional", "doubling"]
Placement = Literal["none", "loss", "reward"]
