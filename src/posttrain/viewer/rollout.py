"""One rollout: its tokens with every number that is known of them, and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.runs import Filter
from posttrain.runs.token_numbers import LISTS
from posttrain.viewer.group_pages import COLUMNS, clean, cut, members, shortened
from posttrain.viewer.shelf import NotRecordedError, ShownRun, UnknownError

if TYPE_CHECKING:
    from posttrain.viewer.recomputed import Computed

MAX_TOKENS = 4000  # of a rollout in one answer
MAX_CHARACTERS = 20_000  # of a text that is not parted into tokens
MAX_STEP_TOKENS = 2_000_000  # of a step that is computed again
_TOKENS = ("prompt_tokens", "completion_tokens", "sampler_logprobs")


def rollout_page(
    run: ShownRun, *, step: int, group: int, sample: int, offset: int = 0
) -> dict[str, Any]:
    """A rollout as text and tokens, from token ``offset`` behind the prompt on.

    ``columns`` are lists over these tokens, each null where the number does not exist.
    """
    row, siblings = find_rollout(run, step=step, group=group, sample=sample)
    tokens = row["completion_tokens"]
    if not 0 <= offset <= len(tokens):
        raise ValueError(f"offset: expected 0 to {len(tokens)}, got {offset}")
    window = slice(offset, offset + MAX_TOKENS)
    numbers = run.tokens(step)
    kept = None if numbers is None else numbers.rows.get((group, sample))
    if kept is not None and not fits(kept, row):
        kept = None
    columns = {"sampler": row["sampler_logprobs"]}
    for name in LISTS:
        if kept is not None and kept[name] is not None:
            columns[name] = kept[name]
    active = [value is not None for value in row["sampler_logprobs"]]
    shown = {
        name: [
            clean(v) if on else None for v, on in zip(values[window], active[window], strict=True)
        ]
        for name, values in columns.items()
    }
    texts = token_texts(run, tokens, whole=row["completion"])
    prompt = token_texts(run, row["prompt_tokens"], whole=row["prompt"])
    special = run.texts()
    known = frozenset() if special is None else special.special
    return {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_id": row["prompt_id"],
        "rollout": {
            **shortened(row),
            "turns": _turns(row),
            "completion": cut(row["completion"], MAX_CHARACTERS),
        },
        "prompt": {
            "text": cut(row["prompt"], MAX_CHARACTERS),
            "tokens": row["prompt_tokens"][:MAX_TOKENS],
            "texts": prompt[:MAX_TOKENS],
            "special": [token in known for token in row["prompt_tokens"][:MAX_TOKENS]],
        },
        "tokens": tokens[window],
        "texts": texts[window],
        "active": active[window],
        "special": [token in known for token in tokens[window]],
        "columns": shown,
        "offset": offset,
        "total": len(tokens),
        "split": special is not None,
        "optimiser_step": None if kept is None else kept["optimiser_step"],
        "siblings": [
            {"sample": each["sample"], "reward": clean(each["reward"]), "state": each["state"]}
            for each in siblings
        ],
    }


def explain_rollout(run: ShownRun, *, step: int, group: int, sample: int) -> dict[str, Any]:
    """The arithmetic of a rollout."""
    from posttrain.viewer.explained import Explained, explain  # it takes torch, and seconds

    own, siblings = find_rollout(run, step=step, group=group, sample=sample)
    computed = computed_step(run, step)
    if (group, sample) not in computed.keys:
        raise NotRecordedError(
            f"the tokens of this group were not recorded: run.token_numbers keeps the first groups "
            f"of a step, here {len(computed.keys)} of {computed.facts['sequences']} rollouts"
        )
    rollout = Explained(
        row=computed.keys.index((group, sample)),
        siblings=siblings,
        own={**own, "parts": {name: clean(value) for name, value in own["parts"].items()}},
        texts=token_texts(run, own["completion_tokens"], whole=own["completion"])[:MAX_TOKENS],
        weights=run.run.stage("rl").weights,
    )
    algorithm = str((run.run.config.get("rl") or {}).get("algorithm", ""))
    found = explain(computed, rollout, algorithm=algorithm)
    return {**found, "step": step, "group": group, "sample": sample, "prompt": cut(own["prompt"])}


def computed_step(run: ShownRun, step: int) -> Computed:
    """A step, computed again; the last one asked for is kept."""
    from posttrain.viewer.recomputed import COLUMNS as ARITHMETIC
    from posttrain.viewer.recomputed import compute, section_of

    changed = run.folder.joinpath("config.json").stat().st_mtime_ns
    stamp = (step, changed, run.tokens_stamp(step), run.rollouts().version)
    numbers = run.tokens(step)  # behind the stamp: what is newer than it is read again
    if numbers is None:
        raise NotRecordedError(
            "the numbers of this run's tokens were not recorded; run.token_numbers says of how "
            "many tokens of a step they are"
        )

    def make() -> Computed:
        store = run.rollouts()
        positions = store.find(Filter(first_step=step, last_step=step))
        sizes = store.table["length"].to_numpy()[positions]
        if int(sizes.sum()) > MAX_STEP_TOKENS:
            positions = positions[np.cumsum(sizes) <= MAX_STEP_TOKENS]
        rows: list[dict[str, Any]] = []
        for start in range(0, len(positions), 1000):
            rows += store.read(positions[start : start + 1000], ARITHMETIC)
        kept = numbers.rows
        if not all(fits(kept[key], r) for r in rows if (key := (r["group"], r["sample"])) in kept):
            raise NotRecordedError("this step is being written again; look again in a moment")
        return compute(rows, numbers, section=section_of(run.run.config))

    return run.fresh("computed", make, stamp=stamp)


def fits(kept: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the numbers are of as many tokens as the rollout has.

    A run that goes on from a checkpoint writes a step's rollouts again, and its numbers later.
    """
    lists = (kept[name] for name in LISTS if kept[name] is not None)
    return all(len(values) == len(row["completion_tokens"]) for values in lists)


def find_rollout(
    run: ShownRun, *, step: int, group: int, sample: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A rollout with its tokens, and all of its group."""
    store = run.rollouts()

    def read() -> list[dict[str, Any]]:
        return members(store, step=step, group=group, columns=(*COLUMNS, *_TOKENS))

    found = run.fresh("members", read, stamp=(step, group, store.version))
    own = next((row for row in found if row["sample"] == sample), None)
    if own is None:
        raise UnknownError(f"step {step} has no sample {sample} of group {group}")
    return own, found


def token_texts(run: ShownRun, tokens: Sequence[int], *, whole: str) -> list[str]:
    """The text of each token; without a tokenizer, the whole text stands at the first."""
    texts = run.texts()
    if texts is None:
        return [cut(whole, MAX_CHARACTERS), *([""] * (len(tokens) - 1))] if len(tokens) else []
    return texts.split(tokens)


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    turns = row["turns"]
    return None if turns is None else [{**turn, "text": cut(turn["text"], 4000)} for turn in turns]
