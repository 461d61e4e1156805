"""What an environment answered as plain data: it crosses pipes, is kept in files, and is compared.

{"text" | "messages" | "tokens": …, "reward": 0.5}     read, and the policy has another turn
{"number": 1.0}   {"score": {…}}   {"none": true}      the end
{"failure": {"kind": "timeout", "reason": …}}          broken
"""

from __future__ import annotations

import functools
import json
import numbers
import traceback
from collections.abc import Mapping
from concurrent.futures import thread
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from posttrain.protocols import Answer
from posttrain.types import Observation, Score, ScoreState, as_number

Plain = dict[str, Any]
LONGEST = 2**20  # bytes of an answer as JSON
MAX_DETAILS = 4000  # characters of a traceback

# How an environment can fail, and the state of the score that follows.
KINDS: dict[str, ScoreState] = {
    "raised": "invalid",
    "unreadable": "invalid",
    "too_long": "invalid",
    "memory": "invalid",
    "changed": "invalid",
    "timeout": "timeout",
    "crashed": "crashed",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An environment that gave no answer: its kind is one of :data:`KINDS`.

    >>> Failure(kind="timeout", reason="no answer within 30 s").state
    'timeout'
    """

    kind: str
    reason: str
    details: str = ""

    @property
    def state(self) -> ScoreState:
        """The state of its rollout's score."""
        return KINDS[self.kind]


def to_plain(answer: Answer | Failure) -> Plain:
    """An answer as plain data; a :class:`Failure` where it is none that can be read.

    >>> to_plain(Observation("warmer", reward=0.1))
    {'text': 'warmer', 'reward': 0.1}
    >>> to_plain({"a": 1})["failure"]["reason"]
    'returned a dict, not a number; return text, messages, tokens, a number, a Score or None'
    """
    try:
        text = json.dumps(_plain(answer))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        return to_plain(Failure(kind="unreadable", reason=f"returned {error}"))
    if len(text) > LONGEST:
        reason = f"answered with {len(text) / 1e6:.1f} MB; at most {LONGEST / 1e6:.1f} MB are read"
        return to_plain(Failure(kind="too_long", reason=reason))
    plain: Plain = json.loads(text)  # as it comes out of a pipe or a file: tuples are lists
    return plain


def from_plain(plain: Plain) -> Answer | Failure:
    """The answer again.

    >>> from_plain(to_plain(0.5)), from_plain(to_plain((5, 6))), from_plain(to_plain(None))
    (0.5, [5, 6], None)
    """
    if "failure" in plain:
        return Failure(**plain["failure"])
    if "score" in plain:
        tokens = tuple(plain["score"]["token_rewards"])
        return Score(**{**plain["score"], "token_rewards": tokens})
    if "number" in plain:
        return float(plain["number"])
    content: Any = next(
        (plain[kind] for kind in ("text", "messages", "tokens") if kind in plain), None
    )
    return Observation(content, reward=plain["reward"]) if "reward" in plain else content


def failed(error: BaseException, *, inside: str) -> Failure:
    """An environment that raised: the line, and the traceback without the frames of ``inside``."""
    frames, callers = error.__traceback__, (inside, thread.__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename in callers:
        frames = frames.tb_next  # the traceback begins in the environment, not in its caller
    own = frames or error.__traceback__
    what = traceback.format_exception_only(error)[-1].strip()
    places = traceback.extract_tb(own)
    place = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    details = "".join(traceback.format_exception(type(error), error, own))
    short = isinstance(error, MemoryError) or "can't start new thread" in what
    kind = "memory" if short else "raised"
    return Failure(kind=kind, reason=f"raised {what[:200]}{place}", details=details[-MAX_DETAILS:])


def _plain(answer: Any) -> Plain:
    if isinstance(answer, Failure):
        return {"failure": asdict(answer)}
    if isinstance(answer, Observation):
        given: Any = answer.reward
        number = functools.partial(as_number, mend="; an Observation's reward is one, or a list")
        reward = [*map(number, given)] if isinstance(given, list | tuple) else number(given)
        return {**_content(answer.content), "reward": reward}
    if isinstance(answer, str | list | tuple):
        return _content(answer)
    if isinstance(answer, Score):
        parts = {str(name): as_number(value) for name, value in answer.parts.items()}
        tokens = [as_number(each) for each in answer.token_rewards]
        found = {"value": as_number(answer.value), "parts": parts, "token_rewards": tokens}
        whole = {each.name: getattr(answer, each.name) for each in fields(answer)}
        return {"score": {**whole, **found}}
    if answer is None:
        return {"none": True}
    kinds = "; return text, messages, tokens, a number, a Score or None"
    return {"number": as_number(answer, mend=kinds)}


def _content(said: Any) -> Plain:
    if isinstance(said, str) and said:
        said.encode()  # half of a surrogate pair is an error
        return {"text": said}
    if not isinstance(said, list | tuple) or not said:
        raise ValueError("an empty reply; return None, or a score, to end the rollout")
    if all(isinstance(each, numbers.Integral) for each in said):
        return {"tokens": [int(each) for each in said]}
    if not all(isinstance(each, Mapping) for each in said):
        raise TypeError("a list of what is neither tokens nor messages")
    if not all(isinstance(each.get("content"), str) for each in said):
        raise ValueError("a message without text in its 'content'")
    "".join(each["content"] for each in said).encode()
    return {"messages": [dict(each) for each in said]}
