"""What a run depends on beyond its recipe's words: own functions and what they use, files.

The run folder remembers a digest of each, so that an edited reward or data file is another run.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import accumulate, chain, product
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from posttrain import __version__
from posttrain.build.setup import Supplied
from posttrain.config import Recipe, Resolved, to_dict
from posttrain.config.paths import PIECES, WORDS
from posttrain.data.row_files import SUFFIXES
from posttrain.registry import look_up
from posttrain.runs import config_digest
from posttrain.runs.drift import FILES, PARSED
from posttrain.types import whole

_FILES = ("data", "test_data", "backbone")
# Of a folder: weights, tokenizer and template of a model, or the rows of a data set.
_OF_FOLDERS = (".safetensors", ".jinja", ".txt", ".model", *SUFFIXES)
_KNOWN_FOLDERS = ("config.json", "adapter_config.json", "state.json", "*-of-*")
_USED = "function_and_what_it_uses"
_WHOLE = 256 * 2**20  # bytes up to which a file is read in full


def run_config(recipe: Resolved, supplied: Supplied) -> dict[str, Any]:
    """What config.json of a run holds: the recipe, and digests of all else that it depends on."""
    known = supplied_digests(supplied), fingerprints(recipe)
    files = {key: table for each in known for key, table in each.get(FILES, {}).items()}
    config = {**to_dict(recipe), **known[0], **known[1]}
    return {**config, "code": code_version(), **({FILES: files} if files else {})}


def fingerprints(recipe: Recipe) -> dict[str, Any]:
    """Digests of the functions, files and model folders that a recipe names; empty without any.

    Beside the digests of functions stand the files behind each, by the key of its digest.
    """
    tables = {"rewards": recipe.rewards}
    if isinstance(recipe, Resolved) and "prefer" in recipe.stages:
        tables["prefer.rewards"] = recipe.prefer.rewards
    named = {f"task.{key}": value for key, value in (recipe.task or {}).items()}
    functions = {"task": str((recipe.task or {}).get("name"))}
    for number, each in enumerate((recipe.task or {}).get("tasks", ()), start=1):
        named |= {f"task.tasks[{number}].{key}": value for key, value in each.items()}
        functions[f"task.tasks[{number}]"] = str(each.get("name"))
    named["model.name"] = recipe.model.name
    own = {key: (recipe.task or {}).get(key) for key in ("accuracy", "env")}
    functions |= {f"task.{key}": spec["name"] for key, spec in own.items() if spec is not None}
    for key, table in tables.items():
        functions |= {f"{key}.{name}": name for name in table}
        named |= {f"{key}.{name}.path": given.get("path") for name, given in table.items()}
    for stage in ("sft", "reward", "dpo"):
        if stage in recipe.stages:
            section = getattr(recipe, stage)
            named |= {f"{stage}.{key}": getattr(section, key, None) for key in _FILES}
    if isinstance(recipe, Resolved) and "rl" in recipe.stages:
        pieces = {f"rl.{piece}": getattr(recipe.rl, piece) for piece in PIECES}
        named["teacher.model"] = recipe.teacher and recipe.teacher.model
        if recipe.rl.critic is not None:
            named["rl.critic.source"] = recipe.rl.critic.source
            pieces["rl.critic.loss"] = recipe.rl.critic.loss
        functions |= {key: str(spec["name"]) for key, spec in pieces.items() if spec}
    looked = {key: _looked_at(_named(name)) for key, name in functions.items() if _is_own(name)}
    found = [(key, contents_digest(value)) for key, value in named.items()]
    known = {key: digest for key, (digest, _) in looked.items()}
    known |= {key: digest for key, digest in found if digest is not None}
    files = {f"contents.{key}": table for key, (_, table) in looked.items() if table}
    return {**({"contents": known} if known else {}), **({FILES: files} if files else {})}


def _is_own(name: str) -> bool:
    """Whether a piece is named ``module:function``, and is none of ours."""
    return ":" in name and not name.startswith("reasoning_gym:")


def _named(name: str) -> Any:
    return look_up(name, {}, kind="task, reward or piece")


def supplied_digests(given: Supplied) -> dict[str, Any]:
    """What the run folder remembers of objects, so that another reward is another run."""
    known: dict[str, Any] = {}
    files: dict[str, dict[str, str]] = {}
    if "task" in given:
        train, test = given["task"].prompts("train"), given["task"].prompts("test")
        known["task"] = {"train": len(train), "test": len(test)}
        prompts = [replace(prompt, columns=whole(prompt.columns)) for prompt in (*train, *test)]
        known["task"]["prompts"] = config_digest(repr(prompts))
    if "rewards" in given:
        known["rewards"] = {}
        for reward in given["rewards"].rewards:
            digest, behind = _looked_at(reward.function)
            known["rewards"][reward.name] = {"weight": reward.weight, _USED: digest}
            files |= {f"supplied.rewards.{reward.name}.{_USED}": behind} if behind else {}
    if "engine" in given:
        known["engine"] = type(given["engine"]).__name__
    if "callbacks" in given:  # what they hold may change while they work
        names = [getattr(one, "__qualname__", type(one).__name__) for one in given["callbacks"]]
        known["callbacks"] = names
    return {**({"supplied": known} if known else {}), **({FILES: files} if files else {})}


def code_version() -> dict[str, str]:
    """What the numbers of a run come from beside its recipe: this code, and what computes."""
    package = Path(__file__).parents[1]
    texts = [(str(path.relative_to(package)), path) for path in package.rglob("*.py")]
    source = config_digest(*(f"{name} {_digest(path)}" for name, path in sorted(texts)))
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"posttrain": __version__, "source": source[:16], **versions}


def contents_digest(value: Any) -> str | None:
    """The digest of a file, a model or data folder; None for what is none, or means a stage."""
    if not isinstance(value, str) or value in WORDS:
        return None
    path = Path(value).expanduser()
    if path.is_file():
        return _digest(path)
    if not path.is_dir() or not any(any(path.glob(name)) for name in _KNOWN_FOLDERS):
        return None
    files = (file for file in path.iterdir() if file.suffix in _OF_FOLDERS and file.is_file())
    return config_digest(*(f"{file.name} {_digest(file)}" for file in sorted(files)))


def _digest(file: Path) -> str:
    """Of a file's bytes; of a large one's size, beginning and end: reading it all takes minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if size <= _WHOLE:
            digest.update(opened.read())
        else:
            digest.update(opened.read(_WHOLE // 2))
            opened.seek(-_WHOLE // 2, 2)
            digest.update(opened.read())
    return digest.hexdigest()


_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...)}
_HELD = ("__name__", "__self__", "__func__", "__wrapped__", "fget", "func", "args", "keywords")
_BY_VALUE = {"array", "builtins", "collections", "datetime", "decimal", "enum", "fractions"}
_BY_VALUE |= {"numpy", "pathlib", "re", "uuid"}
_LIBRARIES = (Path(os.__file__).parent, Path(__file__).parents[1])  # Python's, and ours


def function_digest(function: Any) -> str:
    """A digest that is the same in every process, and another after any edit of the code.

    Comments and layout are no code; a docstring is, for it can be read.

    It is of the files of the user's modules that the function leads to and of what these import,
    and of the values it holds: defaults, bound arguments, closure, attributes, the globals it
    names. What is neither plain data nor of a class of the user's counts by its type.
    """
    return _looked_at(function)[0]


def _looked_at(function: Any) -> tuple[str, dict[str, str]]:
    """The digest of a function, and those of the files behind it by their names."""
    digest, values, numbers = hashlib.sha256(), [function], {id(function): 0}
    for value in values:  # which grows; what was met before counts by its number, so cycles end
        texts = [str(type(value))]
        for part in _parts(value):
            text = _text(part)
            if not text and numbers.setdefault(id(part), len(values)) == len(values):
                values.append(part)
            texts.append(text or f"{numbers[id(part)]}")
        digest.update(repr(texts).encode())
    modules = {_module(value) for value in values if isinstance(value, FunctionType | type)}
    files = _files(modules)
    digest.update(repr(list(files.values())).encode())
    named: dict[str, str] = {}
    for file, text in files.items():  # the same name in two folders of modules is both
        named[_short(file)] = named.get(_short(file), "") + text[: len(PARSED) + 16]
    return digest.hexdigest()[:16], named


def _short(file: str) -> str:
    """A file as its module is imported, from a folder on the path of modules."""
    folders = [os.path.join(os.path.realpath(folder), "") for folder in sys.path]
    inside = [len(folder) for folder in folders if file.startswith(folder)]
    return file[max(inside, default=len(os.path.dirname(file)) + 1) :]


def _text(value: Any) -> str:
    """Plain data as text, nothing for other values; members of a set by value or by type."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return f"{kind} {hashlib.sha256(value).hexdigest()}"
    if kind in _PLAIN:
        return f"{kind} {value:x}" if kind is int else f"{kind} {value!r}"  # an int of any length
    if kind in (set, frozenset):
        return f"{kind} {sorted(_text(part) or str(type(part)) for part in value)}"
    texts = [_text(part) for part in value] if kind is tuple else [""]
    return f"{kind} {texts}" if all(texts) else ""


def _parts(value: Any) -> list[Any]:
    """What a value is made of."""
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_varnames, *value.co_consts]
    if isinstance(value, type):
        members = vars(value) if _is_users(_module(value)) else {}
        return [{n: m for n, m in members.items() if n[:2] != "__" or isinstance(m, FunctionType)}]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return [str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy()]
    return _object(value)


def _object(value: Any) -> list[Any]:
    """What an object holds; nothing for one of a library that is compared by identity."""
    kind = type(value)
    base: Any = next(base for base in kind.__mro__ if not _is_users(_module(base)))
    own = [] if base is kind else [kind, object.__getstate__(value)]
    if issubclass(base, list | tuple):
        return [*own, *base.__iter__(value)]
    if issubclass(base, set | frozenset) and own:
        return [*own, frozenset(base.__iter__(value))]
    if issubclass(base, dict):
        items = sorted(dict.items(value), key=lambda item: _text(item[0]) or str(type(item[0])))
        return [*own, *chain.from_iterable(items)]
    if kind.__module__ in ("builtins", "functools") and kind is not ModuleType:
        return [getattr(value, name) for name in _HELD if hasattr(value, name)]
    if base.__hash__ is object.__hash__ or base.__module__.partition(".")[0] not in _BY_VALUE:
        return own
    reduced = copyreg.dispatch_table.get(base, lambda value: base.__reduce_ex__(value, 4))(value)
    return [*own, *(list(part) if isinstance(part, Iterator) else part for part in reduced)]


def _function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    held = [function.__qualname__, *cells, vars(function)]
    if not _is_users(_module(function)):
        return held
    used = [function.__globals__.get(name) for name in sorted(_names(function.__code__))]
    return [*held, function.__code__, function.__defaults__, function.__kwdefaults__, *used]


def _names(code: CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


def _module(value: Any) -> str:
    """Where a function or a class was written: a decorator says it of the function in it."""
    known = value.__globals__.get("__name__") if isinstance(value, FunctionType) else None
    return str(known or value.__module__)


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return _is_users_file(file) if file else module not in sys.builtin_module_names


def module_folders(names: Sequence[str]) -> list[str]:
    """The folders that the user's modules among these were imported from."""
    files = {name: Path(getattr(sys.modules.get(name), "__file__", None) or "") for name in names}
    depths = {name: name.count(".") + (file.stem == "__init__") for name, file in files.items()}
    own = (name for name, file in files.items() if file.name and _is_users_file(str(file)))
    return list(dict.fromkeys(str(files[name].absolute().parents[depths[name]]) for name in own))


@functools.cache
def _is_users_file(file: str) -> bool:
    path = Path(file).absolute()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not any(path.is_relative_to(library) for library in _LIBRARIES)


def _files(modules: set[str]) -> dict[str, str]:
    """Digests of the user's files behind modules, and of all that these import."""
    names = {name for module in modules for name in accumulate(module.split("."), "{}.{}".format)}
    waiting = [getattr(sys.modules.get(name), "__file__", None) or "" for name in sorted(names)]
    found: dict[str, str] = {}
    for file in map(os.path.realpath, waiting):  # which grows
        if file not in found and os.path.isfile(file) and _is_users_file(file):
            text, tree = Path(file).read_bytes(), ast.Module([], [])
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                tree = ast.parse(text)  # not where it is compiled, or broken since its import
                text = ast.dump(tree, annotate_fields=False).encode("utf-8", "surrogatepass")
            found[file] = PARSED + hashlib.sha256(text).hexdigest()
            waiting += [path for path in _imports(Path(file), tree) if os.path.isfile(path)]
    return found


def _imports(file: Path, tree: ast.Module) -> Iterator[str]:
    """The files that a file may import, wherever in it the statement stands; none is run."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        level, module = getattr(node, "level", 0), getattr(node, "module", None)
        above = [str(path) for path in file.parents]  # a linked install is on no path
        folders = above[level - 1 : level] if level else filter(_is_users_file, [*sys.path, *above])
        names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
        names = [name for name in names if level or _is_users(name.partition(".")[0])]
        for folder, name in product(folders, names):
            for path in accumulate(["", *name.split(".")], os.path.join, initial=folder):
                yield from (f"{path}.py", os.path.join(path, "__init__.py"))
