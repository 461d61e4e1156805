"""Does the expression reach the target with the given numbers?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from posttrain.rewards.declared import declare
from posttrain.rewards.expressions import evaluate
from posttrain.rewards.extraction import Extract, extract_answer


@declare(checks_answer=True)
def countdown_expression(
    completion: str, puzzle: Mapping[str, Any], *, extract: Extract = "whole"
) -> float:
    """1 where an expression equals the target and uses each given number at most once, else 0.

    ``puzzle`` is ``{"numbers": [25, 3, 7], "target": 46}``. The expression is computed exactly.

    >>> puzzle = {"numbers": [25, 3, 7, 2], "target": 154}
    >>> countdown_expression("(25 - 3) * 7", puzzle), countdown_expression("22 * 7", puzzle)
    (1.0, 0.0)
    """
    numbers, target = puzzle["numbers"], puzzle["target"]
    text = extract_answer(completion, extract)
    result = None if text is None else evaluate(text)
    if result is None:
        return 0.0
    value, used = result
    return float(value == target and Counter(used) <= Counter(numbers))
