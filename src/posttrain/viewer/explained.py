"""The arithmetic of one rollout in words: rewards, baseline, advantage, ratio, clip, term, weight.

Equations are those of the pieces' own docstrings, numbers those of :mod:`.recomputed`; what is said
of a baseline goes by what a piece declares, so that a piece of any name is explained.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.algorithms.ops import keep
from posttrain.algorithms.pieces import centred_over, needed, smallest_group
from posttrain.algorithms.table import ALGORITHMS
from posttrain.registry import options
from posttrain.viewer.recomputed import Computed

AGREES = 1e-6
_EQUATION = re.compile(r"``([^`]*[=←][^`]*)``", re.DOTALL)
_LOW, _HIGH = "clip_low", "clip_high"
_ENV = "env"  # the part that is an environment's score


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The rollout to explain: its sequence in the step, its group's rows, its tokens as text."""

    row: int
    siblings: Sequence[Mapping[str, Any]]
    own: Mapping[str, Any]
    texts: Sequence[str]
    weights: Mapping[str, float]


def explain(step: Computed, rollout: Explained, *, algorithm: str) -> dict[str, Any]:
    """Everything that the page Explain shows of a rollout, and the same as text."""
    row = rollout.row
    differs = step.differs_by(row)
    parts = [
        _rewards(step, rollout),
        _baseline(step, rollout),
        _advantage(step, row),
        *([] if step.outputs.logprobs is None else [_ratio(step, row), _clip(step, row)]),
        _term(step, row),
        _weight(step, row),
    ]
    known = ALGORITHMS.get(algorithm)
    found = {
        "algorithm": algorithm,
        "title": known.title if known else "",
        "equation": known.equation if known else "",
        "reference": known.reference if known else "",
        "parts": parts,
        "siblings": _siblings(step, rollout),
        "tokens": _tokens(step, rollout),
        "differs": differs,
        "agrees": all(value <= AGREES * _scale(step, row) for value in differs.values()),
        "whole": step.whole,
        "sequences": step.facts["sequences"],
        "recorded": len(step.keys),
    }
    return {**found, "text": as_text(found)}


def equation_of(function: Callable[..., Any]) -> str:
    """The first equation in the docstring of a piece; empty where it has none.

    >>> from posttrain.algorithms.losses import clipped
    >>> equation_of(clipped)
    'ℓ = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)'
    """
    while isinstance(function, functools.partial):
        function = function.func
    found = _EQUATION.search(inspect.getdoc(function) or "")
    return " ".join(found[1].split()) if found else ""


def _rewards(step: Computed, rollout: Explained) -> dict[str, Any]:
    own, row, weights = rollout.own, rollout.row, rollout.weights
    if _ENV in own["parts"]:  # what it says is the score; the rewards are only shown beside it
        weights = {**dict.fromkeys(weights, 0.0), _ENV: 1.0}
    facts = [
        _fact(f"{name}, weight {weights[name]:g}" if name in weights else name, value)
        for name, value in own["parts"].items()
    ]
    facts.append(_fact("reward R", own["reward"]))
    paid, note = float(step.returns[row]), ""
    if own["state"] != "ok":
        note = f"Its grader broke ({own['state']}): it is in no baseline and has no loss."
    elif abs(paid - float(own["reward"])) > 1e-9:
        facts.append(_fact("R after shaping (length, end, KL)", paid))
    for number, turn in enumerate([t for t in own["turns"] or () if t["sampled"]], start=1):
        facts.append(_fact(f"earned by turn {number}", turn["reward"]))
    several = len([weight for weight in weights.values() if weight]) > 1
    equation = "R = Σ weight · part" if several else ""
    return _part("Reward", equation, facts=facts, note=note)


def _baseline(step: Computed, rollout: Explained) -> dict[str, Any]:
    batch, row, advantage = step.batch, rollout.row, step.plan.advantage
    needs, active = needed(advantage), batch.active[row]
    facts, said = [], []
    if smallest_group(advantage) > 1:
        same = batch.need("groups") == batch.need("groups")[row]
        valid = same & batch.active.any(dim=1)
        returns = step.returns[valid].double()
        facts += [_fact("completions of the group", int(valid.sum()))]
        if len(returns):
            spread = float(returns.std(correction=0))
            facts += [_fact("mean of the group", float(returns.mean()))]
            facts += [_fact("deviation, by G", spread)]
        if len(returns) > 1:
            facts += [_fact("deviation, by G − 1", float(returns.std()))]
        said.append("The completions of the same prompt are what it is compared with.")
    if "greedy_rewards" in needs and batch.greedy_rewards is not None:
        facts.append(_fact("reward of the greedy answer", float(batch.greedy_rewards[row])))
        said.append("What the same prompt earns without sampling.")
    if "baseline" in needs and batch.baseline is not None:
        facts.append(_fact("running mean of earlier rewards", float(batch.baseline)))
    if "values" in needs and batch.values is not None and active.any():
        chosen = batch.values[row][active]
        facts.append(_fact("critic, first token", float(chosen[0])))
        facts.append(_fact("critic, last token", float(chosen[-1])))
        said.append("The critic says for each token what was to be expected.")
    if "teacher_logprobs" in needs:
        said.append("The teacher's log-prob of each token is what it is compared with.")
    if centred_over(advantage) == "batch":
        everyone = "" if step.whole else " (of which not all were recorded)"
        facts.append(_fact("sequences of the batch", step.facts["sequences"]))
        said.append(f"Compared with all tokens of the batch{everyone}.")
    return _part("Baseline", "", facts=facts, note=" ".join(said) or "Nothing is subtracted.")


def _advantage(step: Computed, row: int) -> dict[str, Any]:
    values = step.batch.need("advantages")[row][step.batch.active[row]]
    facts = [_fact(name, value) for name, value in _options(step.plan.advantage).items()]
    if not len(values):
        return _part("Advantage", equation_of(step.plan.advantage), facts=facts, note="None.")
    low, high = float(values.min()), float(values.max())
    if low == high:
        facts.append(_fact("advantage A, of every token", low))
    else:
        facts += [_fact("lowest A of a token", low), _fact("highest A of a token", high)]
    note = ""
    if low == high == 0:
        note = "No advantage: nothing is learned from this rollout but by KL or entropy."
    return _part("Advantage", equation_of(step.plan.advantage), facts=facts, note=note)


def _ratio(step: Computed, row: int) -> dict[str, Any]:
    log_ratio = _log_ratio(step)[row][step.batch.active[row]]
    facts = []
    if len(log_ratio):
        facts = [
            _fact("lowest ρ", float(log_ratio.min().exp())),
            _fact("highest ρ", float(log_ratio.max().exp())),
            _fact("geometric mean", float(log_ratio.mean().exp())),
        ]
    taken, steps = step.optimiser_steps[row], len(step.facts["losses"])
    note = f"Optimiser step {taken} of {steps} on this batch." if taken else ""
    if taken == 1:
        note += " It is the first: the policy is still the old one, so ρ = 1."
    return _part("Ratio", "ρ = π / π_old = exp(log π − log π_old)", facts=facts, note=note)


def _clip(step: Computed, row: int) -> dict[str, Any]:
    known = _options(step.plan.loss)
    facts = [_fact(name, value) for name, value in known.items()]
    stopped = [step.terms.means[n][row] for n in (_LOW, _HIGH) if n in step.terms.means]
    count = int(step.batch.active[row].sum())
    number = int(sum(bool(v) for each in stopped for v in each.tolist()))
    facts.append(_fact("tokens stopped", f"{number} of {count}"))
    note = "This loss has no clip."
    if known.keys() & {_LOW, _HIGH}:
        note = "A token that has moved past its bound, the way its advantage pushes, is stopped."
    return _part("Clip", "", facts=facts, note=note)


def _term(step: Computed, row: int) -> dict[str, Any]:
    active, plan = step.batch.active[row], step.plan
    facts = []
    names = {
        "policy": "policy, Σ of tokens",
        "kl": f"β · KL, β = {step.facts['kl']:g}",
        "entropy": f"− c · entropy, c = {plan.entropy_coefficient:g}",
        "value": f"critic, c = {plan.value_coefficient:g}",
    }
    for name, value in (step.terms.parts or {"policy": step.terms.loss}).items():
        facts.append(_fact(names.get(name, name), float(value[row][active].sum())))
    if step.batch.correction is not None and active.any():
        mean = float(step.batch.correction[row][active].mean())
        facts.append(_fact("importance correction, mean", mean))
    facts.append(_fact("term ℓ, Σ of tokens", float(step.terms.loss[row][active].sum())))
    return _part("Term", equation_of(plan.loss), facts=facts)


def _weight(step: Computed, row: int) -> dict[str, Any]:
    equation = equation_of(step.plan.weights)
    if step.weights is None:
        return _part("Weight", equation, facts=[], note="No optimiser step has seen this rollout.")
    active = step.batch.active[row]
    weights = step.weights[row][active]
    total = float((weights.double() * step.terms.loss[row][active].double()).sum())
    taken, losses = step.optimiser_steps[row], step.facts["losses"]
    facts = [_fact("weight w of a token", float(weights[0]) if len(weights) else 0.0)]
    facts.append(_fact("Σ w · ℓ: its part of the loss", total))
    if taken:
        facts.append(_fact(f"loss of optimiser step {taken}", losses[taken - 1]))
    note = ""
    if len(weights) and not bool(weights.any()):
        note = "All advantages are 0: it is left out of the update, which changes nothing."
    return _part("Weight", equation, facts=facts, note=note)


def _siblings(step: Computed, rollout: Explained) -> list[dict[str, Any]]:
    place = {key: row for row, key in enumerate(step.keys)}
    rows = []
    for each in rollout.siblings:
        row = place.get((each["group"], each["sample"]))
        known = None if row is None else step.batch.need("advantages")[row][step.batch.active[row]]
        mean = None if known is None or not len(known) else float(known.double().mean())
        rows.append(
            {
                "sample": each["sample"],
                "reward": each["reward"],
                "state": each["state"],
                "paid": None if row is None else float(step.returns[row]),
                "advantage": mean,
                "own": row == rollout.row,
            }
        )
    return rows


def _tokens(step: Computed, rollout: Explained) -> list[dict[str, Any]]:
    """The numbers of each token behind the prompt; of an environment's, the text alone."""
    row, start, batch = rollout.row, step.first[rollout.row], step.batch
    columns = {
        "reward": batch.token_rewards,
        "value": batch.values,
        "advantage": batch.need("advantages"),
        "old": batch.old_logprobs,
        "new": step.outputs.logprobs,
        "ratio": None if step.outputs.logprobs is None else _log_ratio(step).exp(),
        "low": step.terms.means.get(_LOW),
        "high": step.terms.means.get(_HIGH),
        "correction": batch.correction,
        **{f"part_{name}": value for name, value in step.terms.parts.items()},
        "term": step.terms.loss,
        "weight": step.weights,
    }
    lists = {name: value[row].tolist() for name, value in columns.items() if value is not None}
    active = batch.active[row].tolist()
    found = []
    for place, text in enumerate(rollout.texts):
        at = start + place
        chosen = at < len(active) and active[at]
        numbers = {name: values[at] for name, values in lists.items()} if chosen else {}
        found.append({"text": text, "active": chosen, **numbers})
    return found


def _log_ratio(step: Computed) -> torch.Tensor:
    assert step.outputs.logprobs is not None
    difference = step.outputs.logprobs - step.batch.need("old_logprobs")
    return keep(difference, step.batch.active)


def _scale(step: Computed, row: int) -> float:
    """How large the numbers are that are compared: rounding grows with them."""
    active = step.batch.active[row]
    values = torch.cat([step.terms.loss[row][active], step.batch.need("advantages")[row][active]])
    return max(1.0, float(values.abs().max())) if len(values) else 1.0


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: option.default for name, option in options(function).items()}


def _part(
    title: str, equation: str, *, facts: Sequence[Mapping[str, Any]], note: str = ""
) -> dict[str, Any]:
    return {"title": title, "equation": equation, "facts": list(facts), "note": note}


def _fact(label: str, value: Any) -> dict[str, Any]:
    return {"label": label, "value": value}


def number(value: Any) -> str:
    """A number as it is read: six digits that count.

    >>> number(0.25), number(-1.0 / 3), number(None), number("3 of 4")
    ('0.25', '-0.333333', '–', '3 of 4')
    """
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, int | float) and value is not True else str(value)


def as_text(found: Mapping[str, Any]) -> str:
    """The explanation as plain text, to copy."""
    lines = [f"{found['algorithm']}: {found['title']}", *found["equation"].splitlines(), ""]
    for place, part in enumerate(found["parts"], start=1):
        equation = f"   {part['equation']}" if part["equation"] else ""
        lines.append(f"{place}. {part['title']}{equation}")
        lines += [f"   {fact['label']:<38} {number(fact['value'])}" for fact in part["facts"]]
        lines += [f"   {part['note']}"] if part["note"] else []
        if part["title"] == "Baseline" and len(found["siblings"]) > 1:
            lines += ["   sample   reward      A"]
            lines += [
                f"   {each['sample']:>6} {number(each['reward']):>8} "
                f"{number(each['advantage']):>10}{'   ← this one' if each['own'] else ''}"
                for each in found["siblings"]
            ]
    names = [name for name in _SHOWN if any(name in token for token in found["tokens"])]
    lines += ["", "  ".join(["token".ljust(12), *(name.rjust(11) for name in names)])]
    for token in found["tokens"]:
        if token["active"]:
            cells = (number(token.get(name)).rjust(11) for name in names)
            lines.append("  ".join([repr(token["text"])[1:-1][:12].ljust(12), *cells]))
    return "\n".join(lines)


_SHOWN = ("value", "advantage", "old", "new", "ratio", "term", "weight")
