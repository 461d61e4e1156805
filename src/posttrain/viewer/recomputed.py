"""The arithmetic of an update, done again by the library's own pieces on the recorded numbers.

A step is put together from its rollouts and from what was recorded of their tokens; then shaping,
advantage, correction and loss of the run's own plan compute every number once more. What the
learner recorded stands beside it, so that a page can say whether both agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.advantages import sequence_returns
from posttrain.algorithms.kl import Coefficient
from posttrain.build.algorithm import make_plan
from posttrain.config import RlSection
from posttrain.config.defaults import resolve_rl
from posttrain.config.sections import WrittenRl
from posttrain.pipelines.plan import Plan, State, make_objective
from posttrain.pipelines.rl import with_advantages
from posttrain.protocols import Outputs
from posttrain.runs.token_numbers import TokenNumbers
from posttrain.types import Batch, Terms
from posttrain.viewer.shelf import NotRecordedError

COLUMNS = (
    *("group", "sample", "prompt_tokens", "completion_tokens", "sampler_logprobs", "reward"),
    *("state", "version", "turns"),
)
_OF_BATCH = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "turn_rewards")
_OF_MODEL = ("logprobs", "entropy", "divergence")


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A step, computed again.

    ``keys`` name its sequences by (group, sample); ``first`` is where each completion begins.
    ``batch`` has the advantages as computed, ``recorded`` those of the run; ``terms`` are those of
    the loss, ``loss`` those that the learner had, ``weights`` what each token counted.
    """

    plan: Plan
    keys: tuple[tuple[int, int], ...]
    first: tuple[int, ...]
    batch: Batch
    outputs: Outputs
    terms: Terms
    recorded: Tensor
    loss: Tensor | None
    weights: Tensor | None
    optimiser_steps: tuple[int | None, ...]
    facts: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Whether all sequences of the step were recorded."""
        return len(self.keys) == self.facts["sequences"]

    @property
    def returns(self) -> Tensor:
        """What each sequence was paid, after shaping. Shapes: [B]."""
        return sequence_returns(self.batch)

    def differs_by(self, row: int) -> dict[str, float]:
        """The largest difference of a computed number from the recorded one, in a sequence."""
        active = self.batch.active[row]
        found = {"advantage": self.batch.need("advantages")[row] - self.recorded[row]}
        if self.loss is not None:
            found["loss"] = self.terms.loss[row] - self.loss[row]
        return {
            name: float(d[active].abs().max()) if active.any() else 0.0 for name, d in found.items()
        }


def section_of(config: Mapping[str, Any]) -> RlSection:
    """The ``[rl]`` of a run's config; pieces of someone's own file are not loaded."""
    rl = dict(config.get("rl") or {})
    if not rl:
        raise NotRecordedError("this run has no stage rl")
    rl.pop("stop", None)  # texts, which may have a colon
    for name, text in _texts(rl, "rl"):
        if ":" in text:
            raise NotRecordedError(
                f"{name} = {text!r} is code of its author's own, which this page does not run; "
                "the recorded numbers of each token are on the page Tokens"
            )
    return resolve_rl(WrittenRl.model_validate(rl))


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text inside a table, with where it is: any of them may name a piece."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _texts(inside, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside, name)


def compute(
    rows: Sequence[Mapping[str, Any]], numbers: TokenNumbers, *, section: RlSection
) -> Computed:
    """A step computed again, from the rows of its rollouts (:data:`COLUMNS`)."""
    known = [row for row in rows if (row["group"], row["sample"]) in numbers.rows]
    if not known:
        raise NotRecordedError("the numbers of this step's tokens were not recorded")
    kept = [numbers.rows[row["group"], row["sample"]] for row in known]
    plan, facts = make_plan(section), numbers.facts
    batch, first = _batch(known, kept)
    state = State(
        step=facts["step"],
        kl=Coefficient(value=facts["kl"]),
        penalty=None if facts["penalty"] is None else Coefficient(value=facts["penalty"]),
        baseline=facts["baseline"],
    )
    said = {
        name: _padded(kept, name, batch=batch, first=first) for name in (*_OF_MODEL, "new_values")
    }
    outputs = Outputs(**{name: said[name] for name in _OF_MODEL}, values=said["new_values"])
    made = with_advantages(batch, plan=plan, state=state)
    if made.old_logprobs is None and outputs.logprobs is not None:
        made = made.replace(old_logprobs=outputs.logprobs)  # one step on the batch: π is π_old
    objective = make_objective(plan, state, batch=made)
    if objective.only_critic:
        outputs = replace(outputs, logprobs=None, entropy=None)
    return Computed(
        plan=plan,
        keys=tuple((row["group"], row["sample"]) for row in known),
        first=tuple(first),
        batch=made,
        outputs=outputs,
        terms=objective(outputs, made),
        recorded=_padded(kept, "advantages", batch=batch, first=first, needed=True),
        loss=_padded(kept, "loss", batch=batch, first=first),
        weights=_padded(kept, "weights", batch=batch, first=first),
        optimiser_steps=tuple(row["optimiser_step"] for row in kept),
        facts=facts,
    )


def _batch(
    rows: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]
) -> tuple[Batch, list[int]]:
    """The batch as the loop had it before shaping, and where each completion begins."""
    first = [len(row["prompt_tokens"]) for row in rows]
    lengths = [len(row["completion_tokens"]) for row in rows]
    shape = len(rows), max(start + size for start, size in zip(first, lengths, strict=True))
    tokens = torch.zeros(shape, dtype=torch.long)
    mask, attention = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampled, turns = torch.zeros(shape), torch.full(shape, -1)
    for place, row in enumerate(rows):
        start, end = first[place], first[place] + lengths[place]
        tokens[place, :end] = torch.tensor([*row["prompt_tokens"], *row["completion_tokens"]])
        attention[place, :end] = True
        drawn = row["sampler_logprobs"]
        mask[place, start:end] = torch.tensor([value is not None for value in drawn])
        sampled[place, start:end] = torch.tensor([value or 0.0 for value in drawn])
        own = [turn for turn in row["turns"] or () if turn["sampled"]]
        for number, turn in enumerate(own or [{"start": 0, "length": end - start}]):
            at = start + turn["start"]
            turns[place, at : at + turn["length"]] = number
    greedy = [row["greedy_reward"] for row in kept]
    batch = Batch(
        tokens=tokens,
        mask=mask,
        attention=attention,
        turns=turns.masked_fill(~mask, -1) if bool((turns > 0).any()) else None,
        sampler_logprobs=sampled,
        rewards=torch.tensor([row["reward"] or 0.0 for row in rows], dtype=torch.float64),
        valid=torch.tensor([row["state"] == "ok" for row in rows]),
        groups=torch.tensor([row["group"] for row in rows]),
        truncated=torch.tensor([bool(row["cut"]) for row in kept]),
        versions=torch.tensor([row["version"] for row in rows]),
        greedy_rewards=None
        if any(value is None for value in greedy)
        else torch.tensor(greedy, dtype=torch.float64),
    )
    fields = {name: _padded(kept, name, batch=batch, first=first) for name in _OF_BATCH}
    return batch.replace(**fields), first


def _padded(
    kept: Sequence[Mapping[str, Any]],
    name: str,
    *,
    batch: Batch,
    first: Sequence[int],
    needed: bool = False,
) -> Any:
    """A recorded number of all tokens, [B, T]; None where no sequence has it."""
    lists = [row[name] for row in kept]
    if all(values is None for values in lists) and not needed:
        return None
    exact = name == "turn_rewards"
    whole = torch.zeros(batch.tokens.shape, dtype=torch.float64 if exact else torch.float32)
    for place, values in enumerate(lists):
        if values is not None:
            whole[place, first[place] : first[place] + len(values)] = torch.tensor(values)
    return whole
