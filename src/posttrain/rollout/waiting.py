"""Sampled but not yet trained batches (max_lag > 0) as JSON, for checkpoints; exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.types import Collected, Prompt, Rollout, Score, Turn


def to_plain(waiting: Sequence[Collected], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Dicts, lists, numbers and text; a prompt is its place among ``prompts``, and its tokens."""
    places = {id(prompt): place for place, prompt in enumerate(prompts)}
    # A prompt behind which an environment has said something is one of its own.
    known = {prompt.id: place for place, prompt in enumerate(prompts)}
    own = [r.prompt for batch in waiting for r in (*batch.rollouts, *_greedy(batch))]
    places |= {id(each): known[each.id] for each in own if id(each) not in places}
    asked = {places[id(each)]: prompts[places[id(each)]].tokens for each in own}
    batches = [
        {
            **{field: getattr(batch, field) for field in ("resampled", "position", "num_calls")},
            "seconds": dict(batch.seconds),
            "env": dict(batch.env),
            "rollouts": [_rollout(r, places, prompts=prompts) for r in batch.rollouts],
            "greedy": [_rollout(r, places, prompts=prompts) for r in _greedy(batch)],
        }
        for batch in waiting
    ]
    return {"prompts": [[place, list(asked[place])] for place in asked], "batches": batches}


def from_plain(given: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Collected] | None:
    """The batches that :func:`to_plain` wrote; None where a prompt is no longer what it was."""
    for place, tokens in given["prompts"]:
        if place >= len(prompts) or prompts[place].tokens != tuple(tokens):
            return None
    return [
        Collected(
            rollouts=_rollouts(batch, prompts),
            seconds=batch["seconds"],
            env=batch["env"],
            resampled=batch["resampled"],
            position=batch["position"],
            num_calls=batch["num_calls"],
        )
        for batch in given["batches"]
    ]


def _greedy(batch: Collected) -> list[Rollout]:
    """The greedy completions of a batch: a group shares one, so each is written once."""
    found = {r.group: r.greedy for r in batch.rollouts if r.greedy is not None}
    return list(found.values())


def _rollout(
    rollout: Rollout, places: Mapping[int, int], *, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    prompt, place = rollout.prompt, places[id(rollout.prompt)]
    opened = None
    if prompt is not prompts[place]:
        opened = {"text": prompt.text, "messages": prompt.messages, "tokens": prompt.tokens}
    score = None if rollout.score is None else dataclasses.asdict(rollout.score)
    return {
        "prompt": place,
        "opened": opened,
        "limit": rollout.limit,
        "turns": [dataclasses.asdict(turn) for turn in rollout.turns],
        "group": rollout.group,
        "score": score,
    }


def _rollouts(batch: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Rollout]:
    greedy = {row["group"]: _read(row, prompts) for row in batch["greedy"]}
    read = [_read(row, prompts) for row in batch["rollouts"]]
    return [dataclasses.replace(rollout, greedy=greedy.get(rollout.group)) for rollout in read]


def _read(row: Mapping[str, Any], prompts: Sequence[Prompt]) -> Rollout:
    prompt, opened = prompts[row["prompt"]], row["opened"]
    if opened is not None:
        own = {name: tuple(opened[name]) for name in ("messages", "tokens")}
        prompt = dataclasses.replace(prompt, text=opened["text"], **own)
    return Rollout(
        prompt=prompt,
        limit=row["limit"],
        turns=tuple(_turn(turn) for turn in row["turns"]),
        group=row["group"],
        score=None if row["score"] is None else _score(row["score"]),
    )


def _turn(given: Mapping[str, Any]) -> Turn:
    logprobs = given["logprobs"]
    if logprobs is not None:  # NaN and ±inf are stored as strings; float() reads both
        logprobs = tuple(float(value) for value in logprobs)
    names = ("tokens", "token_rewards", "versions")
    tuples = {name: tuple(given[name]) for name in names if name in given}
    return Turn(**{**given, **tuples, "logprobs": logprobs})


def _score(given: Mapping[str, Any]) -> Score:
    parts = {name: float(value) for name, value in given["parts"].items()}
    numbers = {"value": float(given["value"]), "token_rewards": tuple(given["token_rewards"])}
    return Score(**{**given, **numbers, "parts": parts})
