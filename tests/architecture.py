"""The architecture of posttrain, as rules over syntax trees.

Each rule is a function that takes a ``Module`` and yields ``(line, message)`` for each violation;
``RULES`` lists them. What they allow stands in tests/architecture_tables.py. The rules run over
src/posttrain, and in tests/test_architecture.py over tiny packages with one violation each.
"""

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from architecture_tables import (
    ATTENTION,
    CONFINED,
    DOORS,
    EXTRA_EDGES,
    KERNEL,
    LAYERS,
    MAX_CORE_LINES,
    MAX_FAN_OUT,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_MODULES,
    MAX_POSITIONAL,
    MAY_NAME_PIECES,
    MAY_ONLY_IMPORT,
    MAY_SHARE_NAME,
    NAMED_BY_STAGE,
    NAMED_ONLY_IN,
    NOT_CORE,
    OTHER_MEANINGS,
    PICKLES,
    PIECES_AND_STAGES,
    SIGNATURE_FIXED_BY_PYTHON,
    SIGNATURE_IS_DATA,
    STANDARD_AND_TORCH_ONLY,
    STANDARD_ONLY,
)

from posttrain.algorithms.table import PieceKind, piece_table

CONTRACT = Path(__file__).parent / "contract"
LAYER_OF = {package: layer for layer, row in enumerate(LAYERS) for package in row}
IMPORTING = {
    "__import__",
    "import_module",
    "importlib.import_module",
    "written_table",
    "written_function",
}
PIECES = {name for kind in get_args(PieceKind) for name in piece_table(kind)} - PIECES_AND_STAGES
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]  # line, what is wrong and how to fix it


@dataclass(frozen=True)
class Violation:
    """One broken rule, where it is broken, and how to fix it."""

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported dotted name; ``lazy`` when loading the module does not execute the import."""

    name: str
    line: int
    lazy: bool


class Module:
    """One source file: its dotted name inside posttrain ("" is the root), its tree, its imports."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source, filename=str(path))
        *folders, stem = path.relative_to(root).with_suffix("").parts
        self.name = ".".join(folders if stem == "__init__" else [*folders, stem])
        self.package = self.name.split(".")[0]
        self.imports = list(find_imports(self.tree, base=["posttrain", *folders]))


def find_imports(node: ast.AST, *, base: list[str], lazy: bool = False) -> Iterator[Import]:
    """Find every import below a node; ``base`` is what a relative import starts from."""
    for name in imported_names(node, base):
        yield Import(name, node.lineno, lazy)
    lazy = lazy or isinstance(node, FunctionNode | ast.Lambda) or is_type_checking(node)
    for child in ast.iter_child_nodes(node):
        yield from find_imports(child, base=base, lazy=lazy)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is ``if TYPE_CHECKING:`` (with an else it would be code that runs)."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        and not node.orelse
    )


def imported_names(node: ast.AST, base: list[str]) -> list[str]:
    """The full dotted names that one statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = base[: len(base) + 1 - node.level] if node.level else []
        start = [*start, node.module] if node.module else start
        return [".".join([*start, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = ast.unparse(node.func)
        if function in IMPORTING:
            return [str(node.args[0].value)]
    return []


def is_inside(name: str, parent: str) -> bool:
    """Whether a dotted name is ``parent`` or lies below it."""
    return name == parent or name.startswith(parent + ".")


def layers(module: Module) -> Iterator[Finding]:
    """A package imports only what the layer table lets it see, lazily or not."""
    if module.package not in {"", *LAYER_OF}:
        yield 1, f"{module.package!r} has no layer; give it one in tests/architecture_tables.py"
        return
    for item in module.imports:
        if is_inside(item.name, "posttrain") and item.name != "posttrain.__version__":
            message = layer_error(module, item)
            if message:
                yield item.line, message


def layer_error(module: Module, item: Import) -> str | None:
    """Say what is wrong with one import of posttrain by posttrain, if anything is."""
    imported = item.name.removeprefix("posttrain").lstrip(".").split(".")[0]
    if imported not in LAYER_OF:
        return f"{item.name} is not a module; import from the module that defines the name"
    if module.package == "":
        if item.lazy:  # it is the public API: lazily it may reach anything
            return None
        return f"the package root loads {imported}; reach it lazily, inside __getattr__"
    if may_import(module.package, imported):
        return None
    return (
        f"{module.package} may not import {imported}; move the code down a layer, "
        "or take the object as an argument and let build pass it in"
    )


def may_import(importer: str, imported: str) -> bool:
    """Whether the package ``importer`` may import the package ``imported``."""
    if importer == imported or (importer, imported) in EXTRA_EDGES:
        return True
    if importer in MAY_ONLY_IMPORT:
        return imported in MAY_ONLY_IMPORT[importer]
    return LAYER_OF[imported] < LAYER_OF[importer]


def doors(module: Module) -> Iterator[Finding]:
    """A package with doors is entered by them alone."""
    for item in module.imports:
        for package, names in DOORS.items():
            inside = is_inside(item.name, f"posttrain.{package}") and module.package != package
            if inside and not any(
                is_inside(item.name, f"posttrain.{package}.{name}") for name in names
            ):
                listed = " and ".join(f"{package}.{name}" for name in sorted(names))
                yield item.line, f"{item.name} is behind a door; go through {listed}"


def implementations(module: Module) -> Iterator[Finding]:
    """An implementation is named where it is made; others name its protocol."""
    for node in ast.walk(module.tree):
        name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
        if module.package not in NAMED_ONLY_IN.get(name, {module.package}):
            yield node.lineno, f"{name} is an implementation; name its protocol"


def third_parties(module: Module) -> Iterator[Finding]:
    """A third party is imported only where its row of ``CONFINED`` says."""
    for item in module.imports:
        root = item.name.split(".")[0]
        if root != "posttrain" and root not in sys.stdlib_module_names:
            message = third_party_error(module, item.name)
            if message:
                yield item.line, message


def third_party_error(module: Module, name: str) -> str | None:
    """Say what is wrong with one import of a third party, if anything is."""
    if module.package in STANDARD_ONLY:
        return f"{name}: {module.package} may use the standard library alone"
    pure = module.package in STANDARD_AND_TORCH_ONLY
    free = {"torch"} if pure else {"torch", "numpy"}
    homes = next((CONFINED[key] for key in CONFINED if is_inside(name, key)), None)
    if homes is None and name.split(".")[0] in free:
        return None
    if pure:
        where = module.package or "the package root"
        return f"{name}: {where} may use the standard library and torch alone"
    if homes is None:
        return f"{name}: unknown third party; add a row to CONFINED, or do without it"
    if any(is_inside(module.name, home) for home in homes):
        return None
    return f"{name}: allowed only in {', '.join(homes)}; go through a function there"


def star_imports(module: Module) -> Iterator[Finding]:
    """Names are imported one by one."""
    for item in module.imports:
        if item.name.endswith(".*"):
            yield item.line, "`import *` hides where names come from; list them"


def file_size(module: Module) -> Iterator[Finding]:
    """A file can be read in one sitting."""
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_FILE_LINES:
        message = f"{num_lines} lines, {MAX_FILE_LINES} allowed; split the file by what it knows"
        yield MAX_FILE_LINES + 1, message


def function_size(module: Module) -> Iterator[Finding]:
    """A function fits on a page, its docstring not counted."""
    for node in ast.walk(module.tree):
        if isinstance(node, FunctionNode):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            num_lines = span(node) - (span(node.body[0]) if has_docstring else 0)
            if num_lines > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {num_lines} lines besides its docstring, "
                    f"{MAX_FUNCTION_LINES} allowed; split it into named steps",
                )


def span(node: ast.stmt) -> int:
    """How many lines a statement takes, decorators not counted."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def keyword_only(module: Module) -> Iterator[Finding]:
    """Beyond two parameters, a caller has to name them."""
    owners = {
        child: parent for parent in ast.walk(module.tree) for child in ast.iter_child_nodes(parent)
    }
    for node in ast.walk(module.tree):
        if (
            not isinstance(node, FunctionNode)
            or node.name in SIGNATURE_FIXED_BY_PYTHON | SIGNATURE_IS_DATA | ATTENTION
        ):
            continue
        decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
        if KERNEL in decorators:
            continue
        is_static = "staticmethod" in decorators
        has_self = isinstance(owners[node], ast.ClassDef) and not is_static
        num_positional = len(node.args.posonlyargs) + len(node.args.args) - has_self
        if num_positional > MAX_POSITIONAL:
            yield (
                node.lineno,
                f"{node.name} takes {num_positional} positional parameters, "
                f"{MAX_POSITIONAL} allowed; put `*,` before the rest",
            )


def unsafe_code(module: Module) -> Iterator[Finding]:
    """Data is never executed: no eval, no exec, no pickles."""
    for item in module.imports:
        if item.name.split(".")[0] in PICKLES or item.name == "torch.load":
            yield item.line, f"{item.name} lets a file run code; use safetensors or JSON"
    for node in ast.walk(module.tree):
        message = unsafe_call(node) if isinstance(node, ast.Call) else None
        if message:
            yield node.lineno, message


def unsafe_call(node: ast.Call) -> str | None:
    """Say what is unsafe about a call, if anything is."""
    function = ast.unparse(node.func)
    if function.removeprefix("builtins.") in {"eval", "exec"}:
        return f"{function}() runs text as code; parse it, for example with ast.literal_eval"
    if function != "torch.load":
        return None
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    is_safe = options.get("weights_only") == "True"
    return None if is_safe else "torch.load() unpickles; pass weights_only=True"


def piece_names(module: Module) -> Iterator[Finding]:
    """A piece is asked what it is, and never known by its name."""
    if any(is_inside(module.name, home) for home in MAY_NAME_PIECES):
        return
    for node in ast.walk(module.tree):
        word = node.value if isinstance(node, ast.Constant) else None
        if word in PIECES - OTHER_MEANINGS.get(module.name, set()):
            yield node.lineno, f"{word!r} names a piece; ask the piece: algorithms.pieces.facts"


def contract_suites(module: Module) -> Iterator[Finding]:
    """Every protocol has a suite in tests/contract."""
    if module.name != "protocols":
        return
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
            suite = CONTRACT / f"test_{node.name.lower()}s.py"
            if not suite.is_file() or "\ndef test_" not in suite.read_text(encoding="utf-8"):
                yield (
                    node.lineno,
                    f"{node.name} has no suite; write tests/contract/{suite.name}, and let every "
                    "implementation run through it",
                )


def fan_out(module: Module) -> Iterator[Finding]:
    """A module knows a few others."""
    names = {own_module(item.name, module.root): item.line for item in module.imports[::-1]}
    names.pop(None, None)
    if len(names) > MAX_FAN_OUT:
        yield (
            sorted(names.values())[MAX_FAN_OUT],
            f"imports {len(names)} modules of ours, {MAX_FAN_OUT} allowed; split it by idea",
        )


def own_module(name: str, root: Path) -> Path | None:
    """The file of ours that an imported name is, or is in; None for third parties, and the root."""
    first, *parts = name.split(".")
    for length in range(len(parts), 0, -1) if first == "posttrain" else ():
        place = root.joinpath(*parts[:length])
        if place.is_dir() or place.with_suffix(".py").is_file():
            return place
    return None


def package_size(module: Module) -> Iterator[Finding]:
    """A package can be taken in at a glance."""
    number = sorted(module.path.parent.glob("*.py")).index(module.path) + 1
    if number > MAX_MODULES:
        yield 1, f"module {number} of its package, {MAX_MODULES} allowed; merge, or part by idea"


def own_names(module: Module) -> Iterator[Finding]:
    """No two modules, and no two public classes, have one name: who hears it knows which."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            first = class_files(module.root)[node.name]
            if first != module.path:
                where = first.relative_to(module.root)
                yield node.lineno, f"{where} has a class {node.name}; name it by what it is"
    stem = module.path.stem
    free = stem in MAY_SHARE_NAME or module.name in NAMED_BY_STAGE
    same = [path for path in sorted(module.root.rglob(f"{stem}.py")) if path < module.path]
    if same and not free:
        yield 1, f"{same[0].relative_to(module.root)} has this name; name it by what it does"


@functools.cache
def class_files(root: Path) -> dict[str, Path]:
    """The first file with a class of each name."""
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, path)
    return found


def core_size(module: Module) -> Iterator[Finding]:
    """The core can be read in a week."""
    if module.path.parent != module.root or module.path.stem != "__init__":
        return
    files = [path.relative_to(module.root) for path in module.root.rglob("*.py")]
    core = [module.root / path for path in files if path.parts[0] not in NOT_CORE]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
    if num_lines > MAX_CORE_LINES:
        yield 1, f"the core has {num_lines:,} lines, {MAX_CORE_LINES:,} allowed; delete"


RULES: list[Callable[[Module], Iterator[Finding]]] = [
    layers,
    doors,
    implementations,
    third_parties,
    star_imports,
    file_size,
    function_size,
    keyword_only,
    unsafe_code,
    piece_names,
    contract_suites,
    fan_out,
    package_size,
    own_names,
    core_size,
]


def check(root: Path) -> list[Violation]:
    """Apply every rule to every file below ``root``, the folder of the package posttrain."""
    modules = [Module(path, root) for path in sorted(root.rglob("*.py"))]
    found = [
        Violation(module.path, line, rule.__name__, message)
        for module in modules
        for rule in RULES
        for line, message in rule(module)
    ]
    return list(dict.fromkeys(found))  # one import of several names is one violation
