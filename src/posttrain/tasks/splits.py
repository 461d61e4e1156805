"""Which problems are for training and which for the test.

A hash of the problem itself decides, never its number or the seed: a problem held out for the test
is held out for every seed, every size and every run, so no training set can contain it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Problem = TypeVar("Problem")

HELD_OUT_SHARE = 0.2
_ENUMERABLE = 2**16


def held_out(identity: str, *, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a problem belongs to the test split: its hash, as a number in [0, 1), is < share.

    >>> sum(held_out(str(number)) for number in range(10_000))
    2052
    """
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def shuffled(size: int, *, seed: int, num_needed: int) -> Iterator[int]:
    """The numbers below ``size`` in random order, each once; of very many, only some."""
    generator = random.Random(seed)
    if size <= _ENUMERABLE or size < 16 * num_needed:
        order = list(range(size))
        generator.shuffle(order)
        yield from order
        return
    seen: set[int] = set()
    while len(seen) < min(size // 2, 64 * num_needed + _ENUMERABLE):  # far more than needed
        number = generator.randrange(size)
        if number not in seen:
            seen.add(number)
            yield number


def sample_splits(
    problems: Iterable[Problem],
    *,
    identity: Callable[[Problem], str],
    num_train: int,
    num_test: int,
    kind: str,
    fix: str,
) -> tuple[list[Problem], list[Problem]]:
    """The first ``num_train`` and ``num_test`` problems of a stream, each to its side.

    ``identity`` says what must not stand on both sides. A stream that ends too early is a
    ``ValueError`` that says how many there are, and ``fix``. More of one split leaves the other
    as it is.
    """
    for name, number in {"num_train": num_train, "num_test": num_test}.items():
        if number < (name == "num_train"):
            raise ValueError(f"{kind}: {name} must be at least {int(name == 'num_train')}")
    train: list[Problem] = []
    test: list[Problem] = []
    for problem in problems:
        (test if held_out(identity(problem)) else train).append(problem)
        if len(train) >= num_train and len(test) >= num_test:
            return train[:num_train], test[:num_test]
    raise ValueError(
        f"{kind}: asked for num_train={num_train:,} and num_test={num_test:,}, but "
        f"there are {len(train):,} problems for training and {len(test):,} for the test (a hash "
        f"holds out a fifth); ask for fewer, or {fix}"
    )
