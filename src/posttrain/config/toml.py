"""Plain dicts as TOML text; ``tomllib`` reads it back as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(values: Mapping[str, Any], *, comments: Mapping[str, str] | None = None) -> str:
    """TOML text of ``values``: dicts at the top become ``[tables]``, deeper ones stay in a line.

    None is left out. ``comments`` are by dotted key and stand behind the value.

    >>> print(write_toml({"rl": {"steps": 6, "kl": {"target": 0.1}, "top_k": None}}))
    [rl]
    steps = 6
    kl = { target = 0.1 }
    <BLANKLINE>
    """
    comments = comments or {}
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    blocks = [_lines(plain, comments, prefix="")]
    for name, table in values.items():
        if isinstance(table, Mapping):
            blocks.append([f"[{_key(name)}]", *_lines(table, comments, prefix=f"{name}.")])
    return "\n".join("\n".join(block) + "\n" for block in blocks if block)


def value_text(value: Any) -> str:
    """One value as it stands in TOML.

    >>> value_text([True, 1e-6, "a\\nb", {"a key": 1}])
    '[true, 1e-06, "a\\\\nb", { "a key" = 1 }]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value))  # float(): a numpy float has another repr
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = [f"{_key(k)} = {value_text(v)}" for k, v in value.items() if v is not None]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    raise ValueError(f"TOML has no value for {value!r}, a {type(value).__name__}")


def as_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Dotted keys and their values as words of a command line.

    >>> as_overrides({"adapter.rank": 16, "run.stages": ("rl", "eval")})
    ['--adapter.rank', '16', '--run.stages', 'rl,eval']
    """
    texts = {key: v if isinstance(v, str) else value_text(v) for key, v in keys.items()}
    texts |= {key: ",".join(keys[key]) for key in ("run.stages",) if key in keys}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def _lines(table: Mapping[str, Any], comments: Mapping[str, str], *, prefix: str) -> list[str]:
    lines = []
    for name, value in table.items():
        if value is not None:
            comment = comments.get(f"{prefix}{name}")
            line = f"{_key(name)} = {value_text(value)}"
            lines.append(f"{line}  # {comment}" if comment else line)
    return lines


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for the delete character, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
