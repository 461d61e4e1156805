"""The reward `math` on the corpus of tests/rewards: false verdicts, and time per answer.

    python benchmarks/math_grader.py [--list] [--gsm8k PATH/TO/gsm8k]

Prints false positives and negatives by theme, right answers that do not count against themselves,
bombs that were misjudged or took more than a second, and the processor time of one answer. A
process of its own grades, and is replaced when an answer takes too long or takes it down.
``--list`` names every mistake. With GSM8K's folder (train.jsonl and test.jsonl) its answers are
graded too: each against itself, and against numbers that are off by one, have two digits swapped,
or are ten times as large.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rewards.math_corpus_rows import GOLD_SETS, golds, rows, themes

SECONDS = 20.0  # for one answer, on the clock
MEMORY = 6 << 30
SLOW = 1.0  # processor seconds of one answer
COLUMNS = ("pairs", "equal", "false positive", "false negative", "invalid")


def serve(connection: Connection) -> None:
    """Grade what comes, and say the verdict and the processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from posttrain.rewards import math_answer

    math_answer(r"\boxed{\frac{x+1}{2}}", r"\frac{x}{2}+\frac{1}{2}")  # loads what it needs
    connection.send(None)
    while True:
        completion, gold = connection.recv()
        begin = time.process_time()
        try:
            verdict = {1: "right", 0: "wrong"}[math_answer(completion, gold)]
        except Exception as error:  # noqa: BLE001 - what it raises is what is reported
            verdict = f"invalid: {type(error).__name__}: {error}"
        connection.send((verdict, time.process_time() - begin))


class Grader:
    """A process that grades, and the processor seconds of each answer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child,), daemon=True)
        self.process.start()
        child.close()
        self.connection.recv()

    def grade(self, completion: str, gold: str) -> str:
        """ "right", "wrong", "invalid: …", "timeout" or "crashed"."""
        self.connection.send((completion, gold))
        try:
            if self.connection.poll(SECONDS):
                verdict, seconds = self.connection.recv()
                self.seconds.append(seconds)
                return str(verdict)
            verdict = "timeout"
        except EOFError:
            verdict = "crashed"
        self.seconds.append(SECONDS)
        self.process.kill()
        self.process.join()
        self.start()
        return verdict


def mistakes(grader: Grader, theme: str, counts: Counter[str]) -> Iterator[str]:
    """Grade the pairs of a theme; yields a line for each that went wrong."""
    for row in rows(theme):
        counts["pairs"] += 1
        counts["equal"] += row.equal
        expected = "right" if row.equal else "wrong"
        graded = [(text, grader.grade(text, row.gold)) for text in row.completions]
        wrong = [(text, verdict) for text, verdict in graded if verdict != expected]
        if wrong:
            text, verdict = wrong[0]
            kind = {"right": "false positive", "wrong": "false negative"}.get(verdict, "invalid")
            counts[kind] += 1
            yield f"{theme}: {kind}: {text[:80]!r} for {row.gold[:80]!r} ({row.why}) {verdict[:80]}"


def report_pairs(grader: Grader, *, listed: bool) -> int:
    total: Counter[str] = Counter()
    lines: list[str] = []
    print("theme".ljust(24), *(column.rjust(14) for column in COLUMNS))
    for theme in themes():
        counts: Counter[str] = Counter()
        lines += mistakes(grader, theme, counts)
        print(theme.ljust(24), *(str(counts[column]).rjust(14) for column in COLUMNS), flush=True)
        total += counts
    print("all".ljust(24), *(str(total[column]).rjust(14) for column in COLUMNS))
    print(*(lines if listed else ()), sep="\n")
    return len(lines)


def report_golds(grader: Grader, *, listed: bool) -> int:
    num_failed = 0
    for name in GOLD_SETS:
        forms = {gold: (gold, f"\\boxed{{{gold}}}") for gold in golds(name)}
        failed = [
            g for g, texts in forms.items() if {grader.grade(t, g) for t in texts} != {"right"}
        ]
        num_failed += len(failed)
        print(
            f"{name}: {len(failed)} of {len(forms)} right answers do not count against themselves"
        )
        print(*(failed if listed else ()), sep="\n", end="\n" if listed and failed else "")
    return num_failed


def report_bombs(grader: Grader, *, listed: bool) -> int:
    lines: list[str] = []
    num_graded = 0
    for row in rows("bombs"):
        for text in row.completions:
            verdict, num_graded = grader.grade(text, row.gold), num_graded + 1
            if verdict != ("right" if row.equal else "wrong") or grader.seconds[-1] > SLOW:
                lines.append(f"bomb: {grader.seconds[-1]:.1f} s, {verdict[:60]}: {text[:80]!r}")
    print(f"bombs: {len(lines)} of {num_graded} misjudged or above {SLOW:g} s")
    print(*(lines if listed else ()), sep="\n", end="\n" if listed and lines else "")
    return len(lines)


def report_gsm8k(grader: Grader, folder: Path, *, listed: bool) -> int:
    lines: list[str] = []
    num_graded = 0
    for solution in solutions(folder):
        gold = solution.rpartition("####")[2].strip()
        cases = [(solution, "right"), (f"so it is \\boxed{{{gold}}}.", "right")]
        cases += [(f"#### {other}", "wrong") for other in perturbed(gold)]
        num_graded += len(cases)
        lines += [
            f"gsm8k: {text[-40:]!r} for {gold!r} is not {expected}"
            for text, expected in cases
            if grader.grade(text, gold) != expected
        ]
    print(f"gsm8k: {len(lines)} of {num_graded} answers mistaken")
    print(*(lines if listed else ()), sep="\n", end="\n" if listed and lines else "")
    return len(lines)


def solutions(folder: Path) -> Iterator[str]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name every mistake")
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl")
    options = parser.parse_args()
    grader = Grader()
    num_mistakes = report_pairs(grader, listed=options.list)
    num_mistakes += report_golds(grader, listed=options.list)
    if options.gsm8k:
        num_mistakes += report_gsm8k(grader, options.gsm8k, listed=options.list)
    answers = list(grader.seconds)
    num_mistakes += report_bombs(grader, listed=options.list)
    bombs = grader.seconds[len(answers) :]
    for name, seconds in (("answer", answers), ("bomb", bombs)):
        middle, worst = 1000 * statistics.median(seconds), 1000 * max(seconds)
        print(
            f"{len(seconds)} {name}s: median {middle:.2f} ms, worst {worst:.1f} ms of a processor"
        )
    return int(bool(num_mistakes))


if __name__ == "__main__":
    sys.exit(main())
