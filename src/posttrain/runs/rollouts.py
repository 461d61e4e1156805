"""Every rollout of a run, in Parquet: what was asked, what was written, what it earned.

One file for each step, ``step-000012.parquet``, one row for each completion, one fixed schema, so
that any tool that reads Parquet can read a run: pyarrow, pandas, polars, DuckDB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.disk import keeping, writing
from posttrain.runs.files import replacing
from posttrain.types import Rollout, Score

if TYPE_CHECKING:
    from posttrain.types import Batch  # it loads torch, which whoever reads rollouts does without

# "element" is what Parquet calls it; pyarrow alone would say "item" here and "element" there.
_TOKENS = pa.list_(pa.field("element", pa.int32()))

_TURN = pa.struct(
    [
        ("start", pa.int32()),  # in completion_tokens
        ("length", pa.int32()),
        ("sampled", pa.bool_()),  # the policy wrote it, not an environment
        ("text", pa.string()),
        ("reward", pa.float64()),  # what a turn of the policy earned; null of the environment's
    ]
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int32()),  # numbers the prompt in its batch
        ("sample", pa.int32()),  # numbers the completion in its group
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("prompt_tokens", _TOKENS),
        ("completion_tokens", _TOKENS),
        # null where the policy did not choose the token: an environment wrote it
        ("sampler_logprobs", pa.list_(pa.field("element", pa.float32()))),
        ("reward", pa.float64()),  # null before it was scored
        ("state", pa.string()),
        ("reason", pa.string()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),  # mean over the sequence's tokens; null where it has none
        ("version", pa.int64()),
        ("stop_reason", pa.string()),
        ("length", pa.int32()),  # tokens of the completion
        ("turns", pa.list_(pa.field("element", _TURN))),  # null where it is one turn
        ("token_versions", _TOKENS),  # of each token; null where all are of ``version``
    ],
    metadata={"posttrain.rollouts": "3"},
)

TOKENS = "tokens"  # the folder of what each token came to: posttrain.runs.token_numbers
NEWER = {"turns", "token_versions"}  # columns that earlier files do not have
# Columns whose values come again and again. Log-probs do not: with a dictionary of them a file
# takes three times as long to write and is larger.
_REPEATED = [
    "prompt_id",
    "prompt",
    "prompt_tokens.list.element",
    "completion_tokens.list.element",
    "state",
    "reason",
    "parts.key_value.key",
    "stop_reason",
]

_UNSCORED = Score(value=0.0)  # stands in for its parts alone: it has none
_NAME = re.compile(r"step-(\d{6,18})\.parquet")


def rollout_file(folder: Path, step: int) -> Path:
    """Where the rollouts of a step are.

    >>> rollout_file(Path("rollouts"), 12).name
    'step-000012.parquet'
    """
    return folder / f"step-{step:06d}.parquet"


def step_of(name: str) -> int | None:
    """The step whose rollouts a file of this name holds; None where it is something else.

    >>> step_of("step-000012.parquet"), step_of("index.arrow")
    (12, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and rollout_file(Path(), int(match[1])).name == name else None


def write_rollouts(
    path: str | Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    advantages: Sequence[float | None] | None = None,
) -> None:
    """Write the rollouts of one step, with one advantage for each (see ``sequence_advantages``)."""
    _write(Path(path), _table(rollouts, step=step, advantages=advantages))


class RolloutWriter:
    """Writes the rollouts of step after step while the training goes on.

    What a step hands over is on the disk before the next step hands over its own, and before
    :meth:`wait` returns; there what went wrong is raised. The end of a ``with`` block waits too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: list[Future[None]] = []

    def write(
        self,
        rollouts: Sequence[Rollout],
        *,
        step: int,
        advantages: Sequence[float | None] | None = None,
    ) -> None:
        """As :func:`write_rollouts`; returns when the rollouts are copied, not when written."""
        table = _table(rollouts, step=step, advantages=advantages)
        self.wait()
        self.also(partial(_write, rollout_file(self._folder, step), table))

    def also(self, work: Callable[[], None]) -> None:
        """Have something else of the same step written behind its rollouts."""
        self._pending.append(self._thread.submit(work))

    def wait(self) -> None:
        """Until all that was handed over is on the disk."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:  # else the run ends with its own error
            self.wait()


@contextmanager
def rollout_writer(folder: Path) -> Iterator[RolloutWriter]:
    """A writer into a folder, which is made; an error where it goes away meanwhile."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with keeping(folder), RolloutWriter(folder) as writer:
        yield writer


def sequence_advantages(batch: Batch) -> list[float | None]:
    """Each sequence's mean advantage over its active tokens; None where it has no such token.

    >>> import torch
    >>> from posttrain.types import Batch
    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> advantages = torch.tensor([[1.0, 2.0], [9.0, 9.0]])
    >>> sequence_advantages(Batch(tokens=mask.long(), mask=mask, advantages=advantages))
    [1.5, None]
    """
    active, advantages = batch.active, batch.need("advantages").double()
    sums = advantages.masked_fill(~active, 0.0).sum(dim=1).tolist()
    counts = active.sum(dim=1).tolist()
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def rollout_steps(folder: str | Path) -> list[int]:
    """The steps whose rollouts a folder holds, in order."""
    steps = (step_of(path.name) for path in Path(folder).glob("step-*.parquet"))
    return sorted(step for step in steps if step is not None)


def rollout_table(
    folder: str | Path,
    *,
    step: int | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Rollouts of one step or of all, the first ``limit`` of them, as a pyarrow table.

    Files are read only until ``limit`` is reached; ``columns`` leaves the others unread.
    """
    folder = Path(folder)
    steps = rollout_steps(folder)
    if step is not None and step not in steps:
        held = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "it holds none"
        raise ValueError(f"{folder}: no rollouts of step {step}; {held}")
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    tables, num_rows = [schema.empty_table()], 0
    for each in steps if step is None else [step]:
        if limit is not None and num_rows >= limit:
            break
        path = rollout_file(folder, each)
        there = pq.read_schema(path).names  # earlier files know no turns: they are null there
        names = [name for name in schema.names if name in there or name not in NEWER]
        tables.append(pq.read_table(path, columns=names, partitioning=None))
        num_rows += tables[-1].num_rows
    table = pa.concat_tables(tables, promote_options="default")
    return table if limit is None else table.slice(0, limit)


def read_rollouts(
    folder: str | Path, *, step: int | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """:func:`rollout_table` as plain dicts, one for each completion, ``parts`` a dict by name."""
    rows = rollout_table(folder, step=step, limit=limit).to_pylist(maps_as_pydicts="strict")
    return list(rows)


def _write(path: Path, table: pa.Table) -> None:
    with replacing(path) as beside:
        pq.write_table(table, beside, compression="zstd", use_dictionary=_REPEATED)


def _table(
    rollouts: Sequence[Rollout], *, step: int, advantages: Sequence[float | None] | None
) -> pa.Table:
    """Column by column: a training step waits for this, and by rows it takes three times as long.

    Completions of one prompt stand together, so its text and tokens are prepared once.
    """
    given = [None] * len(rollouts) if advantages is None else list(advantages)
    if len(given) != len(rollouts):
        raise ValueError(
            f"advantages: {len(given)} values for {len(rollouts)} rollouts; "
            "give one for each, None where a rollout has none"
        )
    prompts: dict[int, tuple[str, str]] = {}
    for rollout in rollouts:
        prompt = rollout.prompt
        if id(prompt) not in prompts:
            prompts[id(prompt)] = _text(prompt.id), _text(prompt.shown)
    scores = [rollout.score for rollout in rollouts]
    known = [score or _UNSCORED for score in scores]
    seen: Counter[int] = Counter()
    samples = []
    for rollout in rollouts:
        samples.append(seen[rollout.group])
        seen[rollout.group] += 1
    columns: dict[str, Any] = {
        "step": [step] * len(rollouts),
        "group": [rollout.group for rollout in rollouts],
        "sample": samples,
        "prompt_id": [prompts[id(rollout.prompt)][0] for rollout in rollouts],
        "prompt": [prompts[id(rollout.prompt)][1] for rollout in rollouts],
        "completion": [_text(rollout.text) for rollout in rollouts],
        "prompt_tokens": _lists([rollout.prompt.tokens for rollout in rollouts], np.int32),
        "completion_tokens": _lists([rollout.tokens for rollout in rollouts], np.int32),
        "sampler_logprobs": _lists(
            [rollout.logprobs for rollout in rollouts], np.float32, missing=_replied(rollouts)
        ),
        "reward": [None if score is None else float(score.value) for score in scores],
        "state": [None if score is None else score.state for score in scores],
        "reason": [None if score is None else _text(score.reason) for score in scores],
        "parts": [[(_text(k), float(v)) for k, v in score.parts.items()] for score in known],
        "advantage": [None if value is None else float(value) for value in given],
        "version": [rollout.version for rollout in rollouts],
        "stop_reason": [rollout.stop_reason for rollout in rollouts],
        "length": [sum(rollout.mask) for rollout in rollouts],
        "turns": [turn_rows(rollout) for rollout in rollouts],
        "token_versions": [_versions(rollout) for rollout in rollouts],
    }
    arrays = [
        pa.array(column, SCHEMA.field(name).type) if isinstance(column, list) else column
        for name, column in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def token_ages(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """The share of the policy's tokens that are so many updates older than ``version``.

    >>> from posttrain.types import Prompt, Turn
    >>> mixed = Turn(tokens=(5, 6), text="", logprobs=(-1.0, -1.0), version=3, versions=(3, 4))
    >>> token_ages([Rollout(prompt=Prompt(id="0", text=""), turns=(mixed,), group=0)], 4)
    {'staleness/tokens_0': 0.5, 'staleness/tokens_1': 0.5}
    """
    ages = Counter(
        version - drawn
        for rollout in rollouts
        for turn in rollout.turns
        if turn.sampled
        for drawn in turn.token_versions
    )
    return {f"staleness/tokens_{age}": ages[age] / ages.total() for age in sorted(ages)}


def turn_rows(rollout: Rollout) -> list[dict[str, Any]] | None:
    """The turns of a rollout of several: where each is, who wrote it, and what it earned."""
    if len(rollout.turns) < 2:
        return None
    earned, start, rows = iter(rollout.earned), 0, []
    for turn in rollout.turns:
        row = {"start": start, "length": len(turn.tokens), "sampled": turn.sampled}
        reward = next(earned) if turn.sampled else None
        rows.append({**row, "text": _text(turn.text), "reward": reward})
        start += len(turn.tokens)
    return rows


def _versions(rollout: Rollout) -> list[int] | None:
    """The version of each token, where new weights came in the middle of a turn."""
    if not any(turn.versions for turn in rollout.turns):
        return None
    return [version for turn in rollout.turns for version in turn.token_versions]


def _replied(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    """Which of all tokens the policy did not choose; None where it chose all of them."""
    if all(turn.sampled for rollout in rollouts for turn in rollout.turns):
        return None
    return np.array([not chosen for rollout in rollouts for chosen in rollout.mask])


def _lists(
    rows: Sequence[Sequence[float]],
    number: type[np.int32] | type[np.float32],
    *,
    missing: np.ndarray | None = None,
) -> pa.Array:
    """A column of lists, by way of one flat array; what is ``missing`` in that is null."""
    lengths = [len(row) for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = np.fromiter(chain.from_iterable(rows), dtype=number, count=sum(lengths))
    field = pa.field("element", pa.from_numpy_dtype(np.dtype(number)))
    flat = pa.array(values, mask=missing)
    return pa.ListArray.from_arrays(offsets, flat, type=pa.list_(field))


def _text(text: str) -> str:
    """Text that UTF-8 can hold: half a character, which JSON can smuggle in, becomes ``?``."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
