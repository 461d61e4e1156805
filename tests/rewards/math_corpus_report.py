"""How the reward ``math`` does on the corpus: ``python -m rewards.math_corpus_report [theme …]``.

Prints false positives, false negatives, invalid scores and answers that took too long, by file;
right answers that do not count against themselves; bombs above a second of processor time.
Run it with ``PYTHONPATH=src:tests``; ``--all`` lists every pair that went wrong.
"""

import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from rewards.math_corpus_rows import FOLDER, GOLD_SETS, golds, rows, themes

SECONDS = 20.0  # for one answer, on the clock
MEMORY = 6 << 30
SLOW = 1.0  # processor seconds of one answer


class Graded(NamedTuple):
    """What the grader said: "right", "wrong", "invalid: …", "timeout" or "crashed"."""

    verdict: str
    seconds: float


def _serve(connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from posttrain.rewards import math_answer

    math_answer(r"\boxed{\frac{x+1}{2}}", r"\frac{x}{2}+\frac{1}{2}")  # loads what it needs
    connection.send(None)
    while True:
        completion, gold = connection.recv()
        begin = time.process_time()
        try:
            value = math_answer(completion, gold)
            verdict = "right" if value == 1 else "wrong" if value == 0 else f"invalid: {value}"
        except Exception as error:  # noqa: BLE001 (what it raises is what is reported)
            verdict = f"invalid: {type(error).__name__}: {error}"
        connection.send(Graded(verdict, time.process_time() - begin))


class Grader:
    """A process that grades, replaced when an answer takes too long or takes it down."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        child.close()
        self._connection.recv()

    def grade(self, completion: str, gold: str) -> Graded:
        """The verdict on one completion."""
        self._connection.send((completion, gold))
        try:
            if self._connection.poll(SECONDS):
                return self._connection.recv()
            failed = Graded("timeout", SECONDS)
        except EOFError:
            failed = Graded("crashed", 0.0)
        self._process.kill()
        self._process.join()
        self._start()
        return failed


def _mistakes(grader: Grader, theme: str, counts: Counter[str]) -> Iterator[str]:
    for row in rows(theme):
        graded = [(text, grader.grade(text, row.gold)) for text in row.completions]
        counts["pairs"] += 1
        counts["equal"] += row.equal
        counts["slow"] += any(one.seconds > SLOW for _, one in graded)
        expected = "right" if row.equal else "wrong"
        wrong = [(text, one.verdict) for text, one in graded if one.verdict != expected]
        if not wrong:
            continue
        text, verdict = wrong[0]
        kind = {"right": "false positive", "wrong": "false negative"}.get(verdict, "invalid")
        counts[kind] += 1
        yield f"{kind}: gold {row.gold[:80]!r}, answer {text[:80]!r} ({row.why}) {verdict[:80]}"


def _report_pairs(grader: Grader, chosen: list[str], *, listed: bool) -> None:
    columns = ("pairs", "equal", "false positive", "false negative", "invalid", "slow")
    total: Counter[str] = Counter()
    lines = []
    print("file".ljust(24), *(column.rjust(14) for column in columns))
    for theme in chosen:
        counts: Counter[str] = Counter()
        lines += [f"{theme}: {line}" for line in _mistakes(grader, theme, counts)]
        print(theme.ljust(24), *(str(counts[column]).rjust(14) for column in columns), flush=True)
        total += counts
    print("all".ljust(24), *(str(total[column]).rjust(14) for column in columns))
    print(*(lines if listed else ()), sep="\n")


def _report_golds(grader: Grader, *, listed: bool) -> None:
    for name in GOLD_SETS:
        failures = []
        for gold in golds(name):
            verdicts = [grader.grade(text, gold).verdict for text in (gold, f"\\boxed{{{gold}}}")]
            if verdicts != ["right", "right"]:
                failures.append(f"{name}: {gold} {verdicts}")
        print(f"{name}: {len(failures)} of {len(golds(name))} do not count against themselves")
        print(*(failures if listed else ()), sep="\n")


def _report_bombs(grader: Grader, *, listed: bool) -> None:
    counts: Counter[str] = Counter()
    lines = []
    for row in rows("bombs"):
        expected = "right" if row.equal else "wrong"
        for text in row.completions:
            verdict, seconds = grader.grade(text, row.gold)
            counts["graded"] += 1
            counts["misjudged"] += verdict != expected
            counts[f"above {SLOW:g} s"] += seconds > SLOW
            if verdict != expected or seconds > SLOW:
                lines.append(f"bomb: {seconds:.1f} s {verdict[:60]} {text[:80]!r} ({row.why})")
    print("bombs:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    print(*(lines if listed else ()), sep="\n")


def main() -> None:
    """Print the report of the named themes, or of everything."""
    listed = "--all" in sys.argv
    named = [word for word in sys.argv[1:] if not word.startswith("-")]
    grader = Grader()
    _report_pairs(grader, named or themes(), listed=listed)
    if not named:
        _report_golds(grader, listed=listed)
        if (FOLDER / "bombs.jsonl").exists():
            _report_bombs(grader, listed=listed)


if __name__ == "__main__":
    main()
