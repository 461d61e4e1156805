"""Trying a reward on a file before trusting it: rows in, rows with their scores out."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.build.answer_check import marks_of
from posttrain.config import GradingSection
from posttrain.config.specs import complete_reward
from posttrain.data.row_checks import check_text
from posttrain.data.sources import read_numbered
from posttrain.registry import options as options_of
from posttrain.rewards import REWARDS
from posttrain.rewards.extraction import Extract, extract_answer
from posttrain.rewards.pool import GradingPool
from posttrain.rewards.sample_data import FROM_ROLLOUT
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs.files import check_writable, replacing
from posttrain.track.encoding import encode_json
from posttrain.types import Prompt, Rollout, Score, StopReason, Turn
from posttrain.types.marks import exceeding_one, how_to_declare, no_full_marks

MOST_TOKENS = 10_000_000  # of a completion
_ROUNDING = 1e-9
_REASONS = 3  # shown where every row is broken
_SHOWN = 3  # wrong rows of which it is said what was read
_GIVEN = ("completion", "prompt", "num_tokens", "stop_reason")


@dataclass(frozen=True, kw_only=True)
class Graded:
    """The rows of a file with what a reward said of each, and how long it took in all.

    ``maximum`` is the most that the reward gives: as declared, else 1; None where nobody knows, and
    ``advice`` then says how to declare it. ``workers_died`` counts the workers that were replaced.
    ``read`` is what each row's answer was taken to be, for rewards that extract one; None: nothing.
    """

    path: Path
    rows: Sequence[Mapping[str, Any]]
    scores: Sequence[Score]
    seconds: float
    maximum: float | None = 1.0
    advice: str = ""
    workers_died: int = 0
    read: Sequence[str | None] = ()

    @property
    def states(self) -> dict[str, int]:
        """How many scores there are in each state."""
        return dict(Counter(score.state for score in self.scores))

    @property
    def mean(self) -> float:
        """The mean value of the scores that are no one's fault."""
        values = [score.value for score in self.scores if score.ok]
        return sum(values) / len(values) if values else 0.0

    @property
    def full_marks(self) -> int | None:
        """How many rows have all that the reward gives; None where nobody knows how much that is.

        A reward that declares no maximum is taken to give 1, until it is seen to give more.
        """
        if self.maximum is None:
            return None
        return sum(score.ok and self._is_full(score) for score in self.scores)

    def _is_full(self, score: Score) -> bool:
        most = 1.0 if self.maximum is None else self.maximum
        return score.value >= most - _ROUNDING * max(1.0, abs(most))

    @property
    def misread(self) -> list[str]:
        """What was read in the first few rows that are wrong."""
        return [
            f"row {number} reads as {'nothing' if read is None else repr(read)}"
            + (f", the answer is {row['answer']!r}" if "answer" in row else "")
            for number, (row, score, read) in enumerate(
                zip(self.rows, self.scores, self.read, strict=False), 1
            )
            if score.ok and not self._is_full(score)
        ][:_SHOWN]

    @property
    def told_full_marks(self) -> str:
        """The same for a table."""
        if self.full_marks is None:
            return no_full_marks(max(score.value for score in self.scores if score.ok))
        return f"{self.full_marks:,}"

    @property
    def all_broken(self) -> str:
        """Where no row has a score, the most frequent reasons and how often each came; else ""."""
        if any(score.ok for score in self.scores):
            return ""
        reasons = Counter(score.reason for score in self.scores).most_common(_REASONS)
        return "; ".join(
            f"{reason} ({count:,} of {len(self.scores):,})" for reason, count in reasons
        )

    def write(self, path: str | Path) -> None:
        """One line for each row: itself, its state, value, seconds, reason, and what was read."""
        check_out(path, self.path)
        with replacing(Path(path)) as beside, beside.open("wb") as file:
            for number, (row, score) in enumerate(zip(self.rows, self.scores, strict=True)):
                verdict = {
                    "state": score.state,
                    "value": score.value if score.ok else None,
                    "parts": dict(score.parts),
                    "seconds": round(score.seconds, 6),
                    "reason": score.reason,
                }
                if self.read:
                    verdict["read"] = self.read[number]
                file.write(encode_json({**row, **verdict}) + b"\n")


def grade_file(
    reward: str,
    path: str | Path,
    *,
    options: Mapping[str, Any] | None = None,
    grading: GradingSection | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Graded:
    """Score every row of a JSONL file: ``completion``, and the columns that the reward wants.

    The reward runs in worker processes, with the limits that it has in a run.
    """
    chosen = complete_reward(reward, {"weight": 1.0, **(options or {})})
    scorer = RewardScorer({reward: chosen})
    numbered = read_numbered(path)
    rollouts = [_rollout(row, where=f"{path}:{number}", scorer=scorer) for number, row in numbered]
    limits = grading or GradingSection()
    pool = None
    if limits.workers:
        pool = GradingPool(
            scorer.functions,
            workers=min(limits.workers, max(1, len(rollouts))),
            seconds=limits.seconds,
            memory_mb=limits.memory_mb,
            progress=progress,
        )
        scorer = scorer.with_grader(pool)
    started = time.perf_counter()
    try:
        scores = scorer.score(rollouts)
    finally:
        if pool is not None:
            pool.close()
    seconds = time.perf_counter() - started
    graded = [replace(r, score=score) for r, score in zip(rollouts, scores, strict=True)]
    unknown = exceeding_one(graded, marks_of(scorer))
    return Graded(
        path=Path(path),
        rows=[row for _, row in numbered],
        scores=scores,
        seconds=seconds,
        maximum=None if unknown else scorer.rewards[0].full_marks,
        workers_died=pool.died if pool is not None else 0,
        read=_read(reward, chosen, rollouts=rollouts),
        advice="".join(f"{how_to_declare(*found)}; here, --maximum …" for found in unknown.items()),
    )


def _read(
    reward: str, chosen: Mapping[str, Any], *, rollouts: Sequence[Rollout]
) -> list[str | None]:
    """The answers as the reward extracts them; none where it does not."""
    option = options_of(REWARDS[reward]).get("extract") if reward in REWARDS else None
    if option is None or option.annotation != Extract:
        return []
    how = chosen.get("extract", option.default)
    return [extract_answer(rollout.text, how) for rollout in rollouts]


def check_out(out: str | Path, path: Any) -> None:
    """Refuse, before an hour of work, to write over a file that is read, or where none can be."""
    named = isinstance(path, str | os.PathLike) and os.path.exists(path)
    if named and os.path.exists(out) and os.path.samefile(out, path):
        raise ValueError(
            f"{out}: is the file that is read ({path}), and would be overwritten; write to "
            "another one: --out graded.jsonl"
        )
    check_writable(Path(out))


def _count(given: Any, *, where: str) -> int:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if 0 <= int(given) <= MOST_TOKENS:
            return int(given)
    raise ValueError(
        f"{where}: num_tokens is {given!r}; give a whole number, {MOST_TOKENS:,} at most"
    )


def _rollout(row: Mapping[str, Any], *, where: str, scorer: RewardScorer) -> Rollout:
    if not isinstance(row.get("completion"), str):
        check_text(row, "completion", where=where, mapped=False)  # an empty one is a completion too
    wanted = {name for bound in scorer.functions for name in bound.wanted}
    for name in wanted & (set(FROM_ROLLOUT) - {"prompt", "completion", "stop_reason"}):
        if name not in row:
            raise ValueError(f"{where}: the reward wants {name!r}; add that column to the file")
    columns = {name: value for name, value in row.items() if name not in _GIVEN}
    prompt = Prompt(id=where, text=str(row.get("prompt", "")), columns=columns)
    scorer.check_columns(prompt)
    tokens = (0,) * _count(row.get("num_tokens", 0), where=where)
    reasons: dict[str, StopReason] = {"length": "length", "stop_string": "stop_string"}
    completion = Turn(
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        text=row["completion"],
        stop_reason=reasons.get(str(row.get("stop_reason")), "stop"),
        version=0,
    )
    return Rollout(prompt=prompt, turns=(completion,), group=0)
