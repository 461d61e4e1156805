"""Pages of the Python API, from docstrings: what each package names in its ``__all__``.

They are read by griffe from the text, so that building the site imports nothing of posttrain.
"""

from __future__ import annotations

import ast
from pathlib import Path

_JOBS = """\
# Python API

From docstrings. A whole job is one function of `posttrain`; what it takes beyond the parameters
below are the keys of the recipe's section of the same name: [configuration](../configuration.md).
"""
_TYPES = """\
# Types

What flows through the loop: `posttrain.types`.
"""
_PROTOCOLS = """\
# Protocols

What a part of your own has to have: `posttrain.protocols`. Every implementation runs through one
suite of tests, [tests/contract](../../tests/contract).
"""
_ALGORITHMS = """\
# Algorithms, as functions

The mathematics, tensors in and tensors out: `posttrain.algorithms`. [Algorithms](../algorithms.md)
is the table that is made of these.
"""


def api_pages(package: Path) -> dict[str, str]:
    """The pages by address."""
    types = public(package / "types" / "__init__.py")
    named = [
        name for name in public(package / "__init__.py") if name not in (*types, "__version__")
    ]
    jobs = sorted(named, key=lambda name: (name[0].isupper(), name))  # functions come first
    parts = public(package / "protocols.py")
    mathematics = [name for name in public(package / "algorithms/__init__.py") if name not in types]
    return {
        "api/index.md": _page(_JOBS, "posttrain", jobs),
        "api/types.md": _page(_TYPES, "posttrain.types", types),
        "api/protocols.md": _page(_PROTOCOLS, "posttrain.protocols", parts),
        "api/algorithms.md": _page(_ALGORITHMS, "posttrain.algorithms", mathematics),
    }


def public(file: Path) -> list[str]:
    """The names of ``__all__``, or else the public classes and functions, as written in a file."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]


def _page(text: str, module: str, names: list[str]) -> str:
    return "\n".join([text, *(f"::: {module}.{name}\n" for name in names)])
