"""The reward `math` on GSM8K's own answers: each equals itself, and nothing near it.

    python benchmarks/math_grader.py PATH/TO/gsm8k

Reads train.jsonl and test.jsonl of the folder. Each gold answer is graded against itself, as it
stands in its solution and in a box, and against answers that are off by one, have two digits
swapped, or are ten times as large.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from posttrain.rewards.math_answer import math_answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds train.jsonl and test.jsonl")
    solutions = list(read(parser.parse_args().folder))
    failures: list[str] = []
    counts = {"right": 0, "wrong": 0}
    started = time.perf_counter()
    for solution in solutions:
        gold = solution.rpartition("####")[2].strip()
        for completion in (solution, f"so it is \\boxed{{{gold}}}."):
            counts["right"] += 1
            if math_answer(completion, gold) != 1:
                failures.append(f"{gold!r} is not itself in {completion[-40:]!r}")
        for other in perturbed(gold):
            counts["wrong"] += 1
            if math_answer(f"#### {other}", gold) != 0:
                failures.append(f"{other!r} passes for {gold!r}")
    seconds = time.perf_counter() - started
    graded = sum(counts.values())
    for failure in failures[:20]:
        print(failure)
    print(
        f"{len(solutions)} answers: {counts['right']} right and {counts['wrong']} wrong ones graded"
        f", {len(failures)} of them mistaken; {1000 * seconds / graded:.3f} s per thousand"
    )
    return int(bool(failures))


def read(folder: Path) -> Iterator[str]:
    for split in ("train", "test"):
        with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
            yield from (json.loads(line)["answer"] for line in lines)


def perturbed(gold: str) -> list[str]:
    """Numbers near a gold answer that are not it."""
    plain = gold.replace(",", "")
    number = float(plain) if "." in plain else int(plain)
    digits = list(plain)
    for place in range(len(digits) - 1):
        if digits[place] != digits[place + 1] and "." not in digits[place : place + 2]:
            digits[place], digits[place + 1] = digits[place + 1], digits[place]
            break
    others = [str(number + 1), str(number - 1), "".join(digits), str(number * 10)]
    return [other for other in others if other.lstrip("-").isdigit() and int(other) != number]


if __name__ == "__main__":
    sys.exit(main())
