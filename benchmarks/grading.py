"""How many grades a second, in this process and in the pool; and what one hanging sample costs.

python benchmarks/grading.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from posttrain.rewards.pool import GradingPool
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt, Rollout, Turn

COUNT, ROUNDS, LIMIT = 20_000, 5, 1.0


def trivial(completion: str, answer: str) -> float:
    """As little as a reward can do."""
    return float(completion == answer)


def hanging(completion: str, number: int) -> float:
    """The same, but for one sample that never comes back."""
    if number == 1000:
        time.sleep(3600)
    return 1.0


def rollouts(count: int) -> list[Rollout]:
    """Rollouts of a line each."""
    line = "the quick brown fox jumps over the lazy dog"
    text = Turn(tokens=(1,), logprobs=(0.0,), text=line, stop_reason="stop", version=0)
    columns = [{"answer": line, "number": number} for number in range(count)]
    prompts = [Prompt(id=str(n), text="?", columns=column) for n, column in enumerate(columns)]
    return [Rollout(prompt=prompt, turns=(text,), group=0) for prompt in prompts]


def seconds(work: Callable[[], object]) -> float:
    """The median time of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    given = rollouts(COUNT)
    inline = RewardScorer({trivial: 1.0})
    print(
        f"in this process   {COUNT / seconds(lambda: inline.score(given)):>9,.0f} grades a second"
    )
    for workers in (1, 2):
        pool = GradingPool(inline.functions, workers=workers)
        scorer = inline.with_grader(pool)
        took = seconds(lambda scorer=scorer: scorer.score(given))  # type: ignore[misc]
        print(f"{workers} worker process{'es' if workers > 1 else '  '} {COUNT / took:>9,.0f}")
        pool.close()
    bad = RewardScorer({hanging: 1.0})
    pool = GradingPool(bad.functions, workers=2, seconds=LIMIT)
    begun = time.perf_counter()
    states = [score.state for score in bad.with_grader(pool).score(given)]
    took = time.perf_counter() - begun
    pool.close()
    print(
        f"one of {COUNT:,} hangs: {took:.2f} s in all with a limit of {LIMIT:g} s, "
        f"{states.count('timeout')} timeout"
    )


if __name__ == "__main__":
    main()
