"""What the page can ask: a name and parameters in, JSON out; every answer is bounded.

The server answers from here while it runs, and a page that is one file holds some of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from posttrain.runs import Filter
from posttrain.viewer.charts import stage_charts, step_page
from posttrain.viewer.group_pages import group_page, groups_of, prompt_page, prompts_of
from posttrain.viewer.rollout import explain_rollout, rollout_page
from posttrain.viewer.shelf import Shelf, ShownRun
from posttrain.viewer.won_and_lost import compare_page, settings_page

Asked = Mapping[str, str]
MAX_OVERLAID = 8
MAX_LIMIT = 50
_WHOLE = {"first_step", "last_step", "group"}
_REAL = {"min_reward", "max_reward"}


def runs(shelf: Shelf, asked: Asked) -> Any:
    """All runs, a line each, and how many older ones are not among them."""
    return {"runs": [shown.row() for shown in shelf.look()], "left_out": shelf.left_out}


def charts(shelf: Shelf, asked: Asked) -> Any:
    """The curves of a stage."""
    return stage_charts(_run(shelf, asked), asked.get("stage", "rl"))


def step(shelf: Shelf, asked: Asked) -> Any:
    """A step against those before it."""
    return step_page(_run(shelf, asked), whole(asked, "step"))


def settings(shelf: Shelf, asked: Asked) -> Any:
    """The settings of one run, or of several whose names stand in lines."""
    names = [asked["run"]] if "run" in asked else asked.get("many", "").split("\n")
    return settings_page([shelf.get(name) for name in names[:MAX_OVERLAID]])


def groups(shelf: Shelf, asked: Asked) -> Any:
    """A page of groups by a filter."""
    run = _run(shelf, asked)
    store = run.rollouts()
    made = run.fresh("groups", lambda: groups_of(store), stamp=store.version)
    return group_page(store, made, where=filter_of(asked), **_paged(asked))


def prompts(shelf: Shelf, asked: Asked) -> Any:
    """A page of prompts."""
    run = _run(shelf, asked)
    store = run.rollouts()
    made = run.fresh("prompts", lambda: prompts_of(store), stamp=store.version)
    return prompt_page(store, made, unsolved=asked.get("unsolved") == "1", **_paged(asked))


def rollout(shelf: Shelf, asked: Asked) -> Any:
    """The tokens of a rollout."""
    return rollout_page(_run(shelf, asked), **_place(asked), offset=whole(asked, "offset"))


def explain(shelf: Shelf, asked: Asked) -> Any:
    """The arithmetic of a rollout."""
    return explain_rollout(_run(shelf, asked), **_place(asked))


def compare(shelf: Shelf, asked: Asked) -> Any:
    """Problems won and lost."""
    other = shelf.get(asked["other"]) if asked.get("other") else None
    page = {name: _paged(asked)[name] for name in ("offset", "limit")}
    return compare_page(_run(shelf, asked), other, kind=asked.get("kind", ""), **page)


def models(shelf: Shelf, asked: Asked) -> Any:
    """The models of a run that can be tried."""
    return {"models": list(_run(shelf, asked).models())}


ANSWERS: dict[str, Callable[[Shelf, Asked], Any]] = {
    "runs": runs,
    "charts": charts,
    "step": step,
    "settings": settings,
    "groups": groups,
    "prompts": prompts,
    "rollout": rollout,
    "explain": explain,
    "compare": compare,
    "models": models,
}


def filter_of(asked: Asked) -> Filter:
    """The filter of a query: the fields of :class:`Filter` that are not empty.

    >>> filter_of({"run": "demo", "first_step": "3", "text": ""})
    Filter(first_step=3, last_step=None, min_reward=None, max_reward=None, group=None, state=None,
           stop_reason=None, prompt_id=None, text=None)
    """
    given: dict[str, Any] = {}
    for name in (field.name for field in fields(Filter)):
        text = asked.get(name, "")
        if text == "":
            continue
        if name in _WHOLE:
            given[name] = whole(asked, name)
        elif name in _REAL:
            given[name] = _real(text, name)
        else:
            given[name] = text[:1000]
    return Filter(**given)


def whole(asked: Asked, name: str, *, default: int = 0) -> int:
    """A whole number of a query."""
    text = asked.get(name, "")
    try:
        value = int(text) if text else default
    except ValueError:
        raise ValueError(f"{name}: expected a whole number") from None
    if abs(value) > 2**31:
        raise ValueError(f"{name}: is too large")
    return value


def _real(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a number")
    return value


def _run(shelf: Shelf, asked: Asked) -> ShownRun:
    return shelf.get(asked.get("run", ""))


def _place(asked: Asked) -> dict[str, int]:
    return {name: whole(asked, name) for name in ("step", "group", "sample")}


def _paged(asked: Asked) -> dict[str, Any]:
    given: dict[str, Any] = {
        "offset": max(0, whole(asked, "offset")),
        "limit": min(MAX_LIMIT, max(0, whole(asked, "limit", default=20))),
        "descending": asked.get("descending") == "1",
    }
    return given | ({"sort": asked["sort"]} if asked.get("sort") else {})
