"""Held-out problems before and after a run, and in two runs: won, lost, the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.pipelines.evaluate import share
from posttrain.report.overview import compare
from posttrain.runs.drift import settings
from posttrain.runs.resume import BEFORE_PROBLEMS
from posttrain.viewer.group_pages import clean, cut
from posttrain.viewer.shelf import ShownRun, UnknownError

Row = Mapping[str, Any]
KINDS = ("won", "lost", "both", "neither", "broken")
MAX_ROWS = 100
MAX_BYTES = 256 * 2**20  # of a file of problems


def compare_page(
    first: ShownRun, second: ShownRun | None, *, kind: str = "", offset: int = 0, limit: int = 50
) -> dict[str, Any]:
    """One run before and after, or two runs after training, on the problems that both have.

    A problem is won where the first answer was wrong and the second is right; without a check of
    answers, where the reward rose.
    """
    if kind not in ("", *KINDS) or not 0 <= limit <= MAX_ROWS or offset < 0:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, and at most {MAX_ROWS} rows")
    one = _after(first) if second is not None else _before(first)
    other = _after(second or first)
    names = [first.name, second.name] if second is not None else ["before", "after"]
    shared = [
        name for name in one if name in other and one[name]["prompt"] == other[name]["prompt"]
    ]
    kinds = {name: _kind(one[name], other[name]) for name in shared}
    counts = {each: sum(kind == each for kind in kinds.values()) for each in KINDS}
    chosen = [name for name in shared if kind in ("", kinds[name])]
    rows = [
        {
            "id": name,
            "kind": kinds[name],
            "prompt": cut(one[name]["prompt"]),
            "answer": _text(other[name].get("answer")),
            "sides": [_side(each[name]) for each in (one, other)],
        }
        for name in chosen[offset : offset + limit]
    ]
    missing = "" if shared else _missing(first, second)
    return {
        "names": names,
        "total": len(chosen),
        "offset": offset,
        "problems": len(shared),
        "counts": counts,
        "rows": rows,
        "missing": missing,
        "shares": [_share(each, shared) for each in (one, other)] if shared else [],
        "sign_test": _sign_test(counts["won"], counts["lost"]),
    }


def settings_page(runs: Sequence[ShownRun]) -> dict[str, Any]:
    """The settings of runs: those in which they differ, and all."""
    for run in runs:
        _ = run.run  # no link leads out of it
    paths = [run.folder for run in runs]
    configs = [settings(run.run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    rows = {name: [config.get(name, "unset") for config in configs] for name in names}
    return {"runs": [run.name for run in runs], "differing": compare(paths), "all": rows}


def _before(run: ShownRun) -> dict[str, Row]:
    return _problems(run, run.folder / "rl" / BEFORE_PROBLEMS)


def _after(run: ShownRun) -> dict[str, Row]:
    return _problems(run, run.folder / "eval" / "problems.jsonl")


def _problems(run: ShownRun, path: Path) -> dict[str, Row]:
    """The problems of a file by name; only the first answer to each counts."""
    if not path.is_file():
        return {}
    checked = run.facts.held_out.checked  # no link leads out of the run

    def read() -> dict[str, Row]:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.name}: has more than {MAX_BYTES >> 20} MB, too much to show")
        found: dict[str, Row] = {}
        for line in path.read_bytes().split(b"\n"):
            if line:
                row = json.loads(line)
                marked = row if checked else {**row, "correct": None}
                found.setdefault(str(row["id"]), marked)
        return found

    return run.fresh(f"problems {path.name}", read, stamp=path.stat().st_mtime_ns)


def _kind(one: Row, other: Row) -> str:
    if "ok" not in (one["state"], other["state"]) or one["state"] != other["state"]:
        return "broken"
    if one.get("correct") is None or other.get("correct") is None:
        moved = float(other["reward"]) - float(one["reward"])
        return "won" if moved > 1e-9 else "lost" if moved < -1e-9 else "both"
    return {
        (False, True): "won",
        (True, False): "lost",
        (True, True): "both",
        (False, False): "neither",
    }[bool(one["correct"]), bool(other["correct"])]


def _side(row: Row) -> dict[str, Any]:
    turns = row.get("turns")
    return {
        "completion": cut(_text(row["completion"])),
        "turns": None
        if not turns
        else [{**turn, "text": cut(turn["text"], 300)} for turn in turns],
        "reward": clean(row["reward"]),
        "correct": row.get("correct"),
        "state": row["state"],
        "reason": cut(_text(row.get("reason")), 300),
    }


def _share(rows: Mapping[str, Row], names: Sequence[str]) -> dict[str, Any]:
    """The share of right answers with its interval, and the mean reward."""
    known = [rows[name] for name in names if rows[name]["state"] == "ok"]
    mean = sum(float(row["reward"]) for row in known) / len(known) if known else None
    right = [row["correct"] for row in known if row.get("correct") is not None]
    if not right:
        return {"accuracy": None, "reward": mean, "of": len(known)}
    found = share(sum(right), len(right))
    return {"accuracy": [found.value, found.low, found.high], "reward": mean, "of": len(right)}


def _sign_test(won: int, lost: int) -> float | None:
    """How often chance alone would part won and lost this unevenly (two-sided sign test).

    >>> _sign_test(5, 0), _sign_test(3, 3)
    (0.0625, 1.0)
    """
    from math import comb

    total = won + lost
    if not total:
        return None
    tail = sum(comb(total, k) for k in range(min(won, lost) + 1))
    return min(1.0, tail / 2 ** (total - 1))


def _missing(first: ShownRun, second: ShownRun | None) -> str:
    if second is None:
        return "This run has no evaluation before and after: it needs the stages rl and eval."
    if first.folder == second.folder:
        raise UnknownError("name two runs")
    for run in (first, second):
        if not (run.folder / "eval" / "problems.jsonl").is_file():
            return f"{run.name} has no evaluation to compare with: it needs the stage eval."
    return "These runs were evaluated on other problems: none is the same in both."


def _text(value: Any) -> str:
    return "" if value is None else str(value)
