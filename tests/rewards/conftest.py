"""Scorers whose functions run in workers."""

from collections.abc import Iterator
from typing import Any

import pytest
from rewards.mishaps import Pooled

from posttrain.rewards.pool import GradingPool
from posttrain.rewards.scorer import RewardScorer


@pytest.fixture
def pooled() -> Iterator[Pooled]:
    """Makes scorers of functions, or of a table, in two workers; ends the workers afterwards."""
    pools: list[GradingPool] = []

    def make(*functions: Any, **options: Any) -> RewardScorer:
        (first, *_) = functions
        scorer = RewardScorer(first if isinstance(first, dict) else dict.fromkeys(functions, 1.0))
        given = {"workers": 2, "seconds": 60.0, "memory_mb": 512, **options}
        pools.append(GradingPool(scorer.functions, **given))
        return scorer.with_grader(pools[-1])

    yield make
    for pool in pools:
        pool.close()
