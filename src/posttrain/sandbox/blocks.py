"""Which part of a completion is the program: fenced blocks, by what they define."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass

LANGUAGES = re.compile(r"(python[0-9.]*|py[0-9]?)?")  # language labels of a fence that mean Python
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*[{.]*([\w+#.-]*)(.*)")
FAR_IN = re.compile(r"[ \t]{4,}(?:`{3,}|~{3,})\s*")  # a fence without a label inside a block
# A fence at the end of a line of text: "So: ```python".
AFTER_TEXT = re.compile(r"()(`{3,})(python\w*|py)\s*$", re.IGNORECASE)
READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\(0")
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A fenced block: its text, whether it has a label, the names it binds and uses."""

    text: str
    labelled: bool
    parses: bool
    binds: frozenset[str]
    uses: frozenset[str]


def extract_code(text: str, wanted: Collection[str] = (), *, reads_input: bool = False) -> str:
    """The program in a text: the last block that defines what is wanted, and those that it needs.

    Where no block defines any of it: the last one that reads its input, if the program should, else
    the last that is labelled as Python and parses, else the last without a label. Without blocks,
    the whole text. A block that is never closed extends to the end of the text.

    >>> extract_code("```python\\na = 1\\n```\\nUse it:\\n```python\\nprint(a)\\n```", ["a"])
    'a = 1\\n'
    """
    text = text.lstrip("\ufeff")
    blocks = _blocks(text)
    if not blocks:
        return text
    defining = [place for place, block in enumerate(blocks) if not block.binds.isdisjoint(wanted)]
    if not defining:
        return _program(blocks, reads_input=reads_input).text
    chosen = [defining[-1]]
    missing = set(wanted) - blocks[chosen[0]].binds | blocks[chosen[0]].uses
    for place in range(chosen[0] - 1, -1, -1):
        if blocks[place].parses and not missing.isdisjoint(blocks[place].binds):
            chosen.insert(0, place)
            missing = missing - blocks[place].binds | blocks[place].uses
    return "\n".join(blocks[place].text for place in chosen)


def _program(blocks: list[CodeBlock], *, reads_input: bool) -> CodeBlock:
    reading = [block for block in blocks if READS_INPUT.search(block.text)] if reads_input else []
    labelled = [block for block in reading or blocks if block.labelled]
    parsed = [block for block in labelled or reading or blocks if block.parses]
    return (parsed or labelled or reading or blocks)[-1]


def _blocks(text: str) -> list[CodeBlock]:
    """Every fenced block that is Python, or does not say what it is."""
    found: list[CodeBlock] = []
    lines: list[str] = []
    fence = label = indent = ""
    after_text = False
    for line in text.splitlines(keepends=True):
        match = FENCE.match(line)
        # A fence after text may only be quoted: a labelled one replaces it.
        if not fence or (after_text and match and match[3]):
            found += _block(lines, label) if fence else []
            after_text = not match
            match = match or AFTER_TEXT.search(line)
            if match:
                indent, fence, label = match[1], match[2], match[3].lower()
                lines = []
        elif match and _closes(match, fence, indent=indent):
            found += _block(lines, label)
            fence = ""
        else:
            lines.append(line.removeprefix(indent))
    return [*found, *_block(lines, label)] if fence else found


def _closes(match: re.Match[str], fence: str, *, indent: str) -> bool:
    """Whether a fence ends the block: one that stands four columns further in is part of it."""
    bare = not match[3] and not match[4].strip()
    return bare and match[2].startswith(fence) and len(match[1]) < len(indent) + 4


def _block(lines: list[str], label: str) -> list[CodeBlock]:
    if not LANGUAGES.fullmatch(label):
        return []
    text = "".join(lines).lstrip("\ufeff")
    try:
        tree = ast.parse(text)
    except UNREADABLE:
        far_in = (place for place, line in enumerate(lines) if FAR_IN.fullmatch(line))
        cut = next(far_in, None)  # as far in as the code, it may have been meant as the end
        whole = [] if not cut else _block(lines[:cut], label)
        if any(block.parses for block in whole):
            return whole
        # Not a whole program (a body for a preamble, or truncated): the names that it begins to
        # define.
        binds = frozenset(re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
        return [
            CodeBlock(text=text, labelled=bool(label), parses=False, binds=binds, uses=frozenset())
        ]
    binds = frozenset(_bound(tree))
    loaded = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    uses = frozenset(loaded - binds - set(dir(builtins)))
    return [CodeBlock(text=text, labelled=bool(label), parses=True, binds=binds, uses=uses)]


def _bound(tree: ast.Module) -> set[str]:
    """The names that a module defines at its top level."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.ImportFrom) and _is_foreign(node):
            continue  # importing a name from a module that is not standard does not define it
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_foreign(node: ast.ImportFrom) -> bool:
    return (node.module or "").split(".")[0] not in sys.stdlib_module_names
