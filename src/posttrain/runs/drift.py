"""Whether two configs are the same, and if not, where they differ."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.registry import dotted
from posttrain.track.encoding import encode_json

FILES = "files"
"""The key of a config for the files behind each function, which only tell what has changed."""
PARSED = "parsed by {}.{}:".format(*sys.version_info)
"""How the digest of such a file begins: of its code without comments and layout, as this Python
reads it."""
_DIGEST = re.compile(
    r'^"(?:(rows):)?(?:[0-9a-f]{16}|[0-9a-f]{64})"$'
)  # of a file, rows, a function


def config_digest(*parts: Mapping[str, Any] | str) -> str:
    """A name for all that a stage depends on: its section, the digest of the stage before it, …

    >>> config_digest({"steps": 6, "seed": 1}) == config_digest({"seed": 1, "steps": 6})
    True
    """
    plain = json.loads(encode_json(list(parts)))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, ignore: Sequence[str] = ()
) -> list[str]:
    """The settings that differ, by dotted name, with both values; digests tell no one anything.

    ``ignore`` names settings that may differ, or whole tables of them.

    >>> differences({"rl": {"steps": 6, "seed": 1}}, {"rl": {"steps": 12, "group": 8, "seed": 1}})
    ['rl.group: unset → 8', 'rl.steps: 6 → 12']
    >>> one, two = ({"sft": {"data": "a.csv"}, "contents": {"sft.data": 16 * n}} for n in "34")
    >>> differences(one, two)
    ['contents.sft.data: "a.csv" has other contents']
    """
    before, after = settings(old), settings(new)
    changed = [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not is_within(name, ignore)
    ]
    return [
        f"{name}: {_told(name, before, after=after)}{_edited(name, old, new)}" for name in changed
    ]


def _told(name: str, before: Mapping[str, str], *, after: Mapping[str, str]) -> str:
    values = [before.get(name, "unset"), after.get(name, "unset")]
    told = [_DIGEST.sub(r"\1", value) or "set" for value in values]
    if told[0] != told[1]:
        return " → ".join(told)
    file = after.get(name.removeprefix("contents."), "") if name.startswith("contents.") else ""
    return f"{file} has other contents" if file else "has changed"


def _edited(name: str, *configs: Mapping[str, Any]) -> str:
    """Which files behind a function have changed, where both configs have recorded them."""
    old, new = (dict(config.get(FILES, {}).get(name, {})) for config in configs)
    if not old or not new or (older := compared_otherwise(configs[0], name)):
        return older if old and new else ""
    names = {each for each, digest in new.items() if digest not in old.values()}
    names |= {each for each, digest in old.items() if digest not in new.values()}
    return f": {', '.join(sorted(names)) or 'no file, but a value that it holds or Python itself'}"


def compared_otherwise(config: Mapping[str, Any], name: str) -> str:
    """What to say of a function whose code was read in another way; empty where it was not."""
    known = config.get(FILES, {}).get(name, {}).values()
    if all(digest.startswith(PARSED) for digest in known):
        return ""
    how = "the run is of an older posttrain or another Python, which read it otherwise"
    return f", or only its comments: {how}"


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Every setting of a config by dotted name, each value as JSON.

    >>> settings({"rl": {"steps": 6, "algorithm": "grpo"}})
    {'rl.steps': '6', 'rl.algorithm': '"grpo"'}
    """
    # As it comes back from the file, so that a path and its text are the same.
    kept = {name: table for name, table in config.items() if name != FILES}
    plain = dotted(json.loads(encode_json(kept)))
    return {name: json.dumps(value, ensure_ascii=False) for name, value in plain.items()}


def is_within(name: str, tables: Sequence[str]) -> bool:
    """Whether a dotted name is among these, or inside one of them.

    >>> is_within("rl.kl.target", ["rl.kl"]), is_within("rl.klaus", ["rl.kl"])
    (True, False)
    """
    return any(name == table or name.startswith(f"{table}.") for table in tables)
