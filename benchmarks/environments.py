"""Several turns with an environment that thinks: tokens a second, as replies come and in rounds.

    python benchmarks/environments.py [--delay 0.2] [--turns 4] [--groups 4 8] [--uneven]

A small model on this machine; a turn ends with each token with a chance of 1 in 24, at the latest
after 64. Environments sleep in a pool of threads, one for each sequence. In rounds all sequences
have their turn, and then all environments, at the same time. Both ways take turns in one process.
With ``--uneven`` replies take an exponentially distributed time whose mean is the delay.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from bench_models import build_model

from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.native import NativeEngine
from posttrain.types import Prompt, Rollout, Sampling, Turn

PROMPTS = [Prompt(id=str(n), text="", tokens=tuple(range(3 + n, 23 + n))) for n in range(4)]
SAID = Turn(tokens=tuple(range(10, 18)), text="")
SAMPLING = Sampling(max_new_tokens=64)


def tokens_per_second(generate: Callable[..., list[list[Rollout]]]) -> float:
    """Sampled tokens of one call, over the seconds it took."""
    begun = time.perf_counter()
    answers = generate()
    lasted = time.perf_counter() - begun
    return sum(sum(rollout.mask) for group in answers for rollout in group) / lasted


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--uneven", action="store_true")
    given = parser.parse_args()
    model, _ = build_model("tiny", end_probability=1 / 24)
    end = model.config.eos_token_id
    engine = NativeEngine(model, end_tokens=(end,), decode=lambda tokens: "", rounds=False)
    print("| sequences | in rounds, tokens/s | as replies come, tokens/s | ratio (each repeat) |")
    print("|---|---|---|---|")
    for group in given.groups:
        count = group * len(PROMPTS)
        with ThreadPoolExecutor(count) as pool:

            def think(rollout: Rollout, number: int) -> Turn | None:
                drawn = random.Random(f"{number}/{len(rollout.turns)}").expovariate(1.0)
                time.sleep(given.delay * (drawn if given.uneven else 1.0))
                return SAID if len(rollout.turns) < 2 * given.turns - 1 else None

            def reply(
                rollout: Rollout, number: int, pool: ThreadPoolExecutor = pool
            ) -> Future[Turn | None]:
                return pool.submit(think, rollout, number)

            asked = {"num_samples": group, "seed": 0, "reply": reply}
            rounds = partial(LocalEngine.generate, engine, PROMPTS, SAMPLING, **asked)
            slots = partial(engine.generate, PROMPTS, SAMPLING, **asked)
            pairs = [
                (tokens_per_second(rounds), tokens_per_second(slots))
                for _ in range(given.repeats + 1)
            ][1:]  # the first makes the slots
        ratios = " ".join(f"{new / old:.2f}" for old, new in pairs)
        old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {count} | {old:,.0f} | {new:,.0f} | {new / old:.2f} ({ratios}) |", flush=True)


if __name__ == "__main__":
    main()
