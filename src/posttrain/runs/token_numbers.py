"""What each token of a rollout came to in its update, in Parquet beside the rollouts.

``tokens/step-000012.parquet`` has a row for each rollout of the first groups of a step, as many as
``run.token_numbers`` allows, found by ``group`` and ``sample``. Lists are over the tokens behind
the prompt, those of an environment too; a list is null where the algorithm has no such number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.disk import writing
from posttrain.runs.files import replacing
from posttrain.runs.index import open_step
from posttrain.runs.rollouts import rollout_file

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import Batch

# Of the batch, as it was before its first optimiser step.
PREPARED = (
    *("advantages", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values"),
    "turn_rewards",
)
# Of the last optimiser step that the sequence was in.
LEARNED = ("logprobs", "entropy", "new_values", "divergence", "loss", "weights")
STOPPED = ("clip_low", "clip_high")
LISTS = (*PREPARED, *LEARNED, *STOPPED)
_NUMBERS = pa.list_(pa.field("element", pa.float32()))
_EXACT = pa.list_(pa.field("element", pa.float64()))
_EXACTLY = {"turn_rewards"}  # what a reward is computed from

SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("optimiser_step", pa.int32()),  # from 1; null where none has seen it
        ("cut", pa.bool_()),  # by the length limit
        ("greedy_reward", pa.float64()),
        *((name, _EXACT if name in _EXACTLY else _NUMBERS) for name in LISTS),
    ]
)
_KEY = b"posttrain.tokens"


@dataclass(frozen=True, kw_only=True)
class TokenNumbers:
    """The rows of a step by (group, sample), and what the whole step was computed with.

    ``facts`` are the number of sequences of the batch, the loss of each of its optimiser steps, β
    of the KL, the penalty of the loss and the moving baseline, each None where there is none.
    """

    rows: Mapping[tuple[int, int], dict[str, Any]]
    facts: Mapping[str, Any]


def token_table(
    batch: Batch, results: Sequence[Mapping[str, Tensor]], *, facts: Mapping[str, Any]
) -> pa.Table | None:
    """What the optimiser steps of a batch have recorded; None where they have recorded nothing.

    ``results`` are :attr:`posttrain.protocols.StepResult.tokens` of each; the last one that a
    sequence was in counts.
    """
    import torch  # whoever only reads does without

    recorded = [each["rows"] for each in results if len(each.get("rows", ()))]
    if not recorded:
        return None
    kept = torch.cat(recorded).unique()
    learned, number = _last(results, kept, batch=batch)
    # From the first token that the policy chose to the last real one.
    behind = ((batch.mask.cumsum(dim=1) > 0) & batch.need("attention"))[kept]
    fields: dict[str, Tensor | None] = {name: getattr(batch, name) for name in PREPARED}
    columns: dict[str, Any] = {
        name: _lists(None if value is None else value[kept], behind, field=SCHEMA.field(name))
        for name, value in fields.items()
    }
    for name in (*LEARNED, *STOPPED):
        columns[name] = _lists(
            learned.get(name), behind, field=SCHEMA.field(name), missing=number == 0
        )
    groups, seen, samples = batch.need("groups").tolist(), Counter[int](), []
    for group in groups:
        samples.append(seen[group])
        seen[group] += 1
    greedy = batch.greedy_rewards
    columns |= {
        "group": batch.need("groups")[kept].tolist(),
        "sample": [samples[row] for row in kept.tolist()],
        "optimiser_step": [value or None for value in number.tolist()],
        "cut": [] if batch.truncated is None else batch.truncated[kept].tolist(),
        "greedy_reward": [None] * len(kept) if greedy is None else greedy[kept].tolist(),
    }
    arrays = [
        pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list) else columns[f.name]
        for f in SCHEMA
    ]
    metadata = {_KEY: json.dumps(dict(facts))}
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))


def write_tokens(folder: Path, step: int, *, table: pa.Table) -> None:
    """Write what :func:`token_table` made."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with replacing(rollout_file(folder, step)) as beside:
        pq.write_table(table, beside, compression="zstd", use_dictionary=False)


def read_tokens(folder: str | Path, step: int) -> TokenNumbers | None:
    """What a step has recorded; None where it has recorded nothing."""
    path = rollout_file(Path(folder), step)
    if not path.is_file():
        return None
    with open_step(path) as file:
        table = file.read(use_threads=False)
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"{path}: does not have the columns of token numbers; move it away")
    table.validate(full=True)
    facts = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    rows = {(row["group"], row["sample"]): row for row in table.to_pylist()}
    return TokenNumbers(rows=rows, facts=facts)


def _last(
    results: Sequence[Mapping[str, Tensor]], kept: Tensor, *, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Of each number the last, [K, T], and of each sequence the step that it is of, [K], from 1."""
    import torch

    number = torch.zeros(len(kept), dtype=torch.long)
    shape = (len(kept), batch.tokens.shape[1])
    whole: dict[str, Tensor] = {}
    for step, each in enumerate(results, start=1):
        if "loss" not in each:  # no sequence of it had an active token
            continue
        places = torch.searchsorted(kept, each["rows"])
        number[places] = step
        for name, value in each.items():
            if name != "rows":
                known = "new_values" if name == "values" else name
                whole.setdefault(known, torch.zeros(shape, dtype=value.dtype))[places] = value
    return whole, number


def _lists(
    values: Tensor | None, behind: Tensor, *, field: pa.Field, missing: Tensor | None = None
) -> pa.Array:
    """The values of each sequence as a list; null for all, or for those ``missing``."""
    if values is None:
        return pa.nulls(len(behind), field.type)
    offsets = np.zeros(len(behind) + 1, dtype=np.int32)
    np.cumsum(behind.sum(dim=1).numpy(), out=offsets[1:])
    flat = pa.array(values[behind].numpy(), field.type.value_type)
    mask = None if missing is None else pa.array(missing.numpy())
    return pa.ListArray.from_arrays(offsets, flat, type=field.type, mask=mask)
