"""What a TRL script or configuration asks for, from its text: nothing of it is ever executed."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST = 2**20  # characters that are read, and that all values of a script may be of together
TRAINERS = ("GRPO", "RLOO", "PPO", "SFT", "Reward", "DPO", "KTO", "ORPO", "CPO")
_DEEP = 20  # assignments that a name is followed through
_NOT_DONE = "not done to the rows (where your prompts are text, completions are text): name a "
_NOT_DONE += 'file of what it makes, DATASET.to_json("rows.jsonl")'


@dataclass(frozen=True)
class Unread:
    """A value that only running the script could give, as it is written there."""

    text: str


@dataclass(kw_only=True)
class TrlJob:
    """A trainer of TRL by its first word, its options, and what stands beside them."""

    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    train: Any = None
    test: Any = None
    rewards: list[Any] = field(default_factory=list)
    adapter: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_asked(path: Path, *, trainer: str | None = None) -> TrlJob:
    """What a Python script, or a YAML or JSON file of options, asks for."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if len(text) > MOST:
        raise ValueError(f"{path}: more than {MOST} characters, which no script of TRL has")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _of_options(_parsed(text, path), trainer=trainer)
    try:
        return _Script(ast.parse(text.replace("\0", " ")), module=path.stem).asked(path)
    except (SyntaxError, RecursionError, MemoryError) as error:  # it may be nested without end
        why = str(error) or type(error).__name__
        raise ValueError(f"{path}: neither Python nor YAML or JSON ({why})") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.suffix.lower() == ".json":
            found = json.loads(text)
        else:  # a value of names for values of names is small here, and as text beyond all memory
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
                raise ValueError("it has aliases, *NAME; write their values out")
            found = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected options by name, got {type(found).__name__}")
    return {str(key): _as_meant(value) for key, value in found.items()}


def _as_meant(value: Any) -> Any:
    """``1e-6``, which is text in YAML, as the number that TRL makes of it.

    >>> _as_meant("1e-6"), _as_meant("linear")
    (1e-06, 'linear')
    """
    written = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if written else value


def _of_options(given: dict[str, Any], *, trainer: str | None) -> TrlJob:
    """The options of ``trl grpo --config FILE``, whose names tell the trainer where they can."""
    guess = "SFT"
    for name, keys in {"GRPO": ("reward_funcs", "num_generations"), "DPO": ("beta",)}.items():
        if guess == "SFT" and any(key in given for key in keys):
            guess = name
    asked = TrlJob(trainer=trainer or guess)
    name, config = given.pop("dataset_name", None), given.pop("dataset_config", None)
    split = given.pop("dataset_train_split", "train")
    if name is not None:
        asked.train = f"{name}:{config}:{split}" if config else f"{name}:{split}"
    if name is not None and (test := given.pop("dataset_test_split", None)):
        asked.test = f"{name}:{config or ''}:{test}"
    asked.model = given.pop("model_name_or_path", None)
    asked.rewards = _listed(given.pop("reward_funcs", None))
    adapters = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules"}
    found = {ours: given.pop(theirs) for theirs, ours in adapters.items() if theirs in given}
    if given.pop("use_peft", bool(found)):
        asked.adapter = {"r": 16, "lora_alpha": 32, **found}
    asked.options = given
    return asked


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


class _Script:
    """The calls and assignments of a script."""

    def __init__(self, tree: ast.Module, *, module: str) -> None:
        self._module, self._left = module, MOST
        guarded = "\nif __name__" in f"\n{ast.unparse(tree)}"
        self._top = "" if guarded else 'put the training under `if __name__ == "__main__":`, and '
        nodes = list(ast.walk(tree))
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._functions = {
            n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        self._names: dict[str, ast.expr] = {}
        self._changed: dict[str, list[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if self._names.setdefault(name, node.value) is not node.value:
                    self._changed.setdefault(name, []).append(ast.unparse(node.value))

    def asked(self, path: Path) -> TrlJob:
        found = [
            (call, name.removesuffix("Trainer"))
            for call in self._calls
            if (name := _called(call)).removesuffix("Trainer") in TRAINERS
            and name.endswith("Trainer")
        ]
        if not found:
            known = ", ".join(f"{name}Trainer" for name in TRAINERS)
            raise ValueError(f"{path}: calls no trainer of TRL; known: {known}")
        call, trainer = found[0]
        asked = TrlJob(trainer=trainer)
        asked.notes += [f"only the first of {len(found)} trainers is read"] if found[1:] else []
        given = {each.arg: each.value for each in call.keywords if each.arg}
        if call.args:
            given.setdefault("model", call.args[0])
        self._read_options(given.pop("args", None), asked)
        asked.model = self._model(given.pop("model", None))
        asked.train = self._data(given.pop("train_dataset", None), asked)
        asked.test = self._data(given.pop("eval_dataset", None), asked)
        asked.rewards = self._rewards(given.pop("reward_funcs", None))
        if own := [each for each in asked.rewards if str(each).startswith(f"{self._module}:")]:
            asked.notes.append(
                f"{', '.join(own)}: a run imports {self._module}.py for this, with all that it "
                f"imports: {self._top}install that, or move rewards into a file of their own"
            )
        if (adapter := self._follow(given.pop("peft_config", None))) is not None:
            asked.adapter = self._keywords(adapter)
        for name, node in given.items():
            if name not in ("processing_class", "tokenizer"):
                asked.notes.append(f"{name} = {ast.unparse(node)}: not read")
        return asked

    def _read_options(self, node: ast.expr | None, asked: TrlJob) -> None:
        config = self._follow(node)
        if isinstance(config, ast.Call) and _called(config).endswith("Config"):
            asked.options = self._keywords(config)
        elif node is not None:
            asked.notes.append(f"args = {ast.unparse(node)}: not read; give the options by hand")

    def _keywords(self, node: ast.expr | None) -> dict[str, Any]:
        keywords = node.keywords if isinstance(node, ast.Call) else []
        return {each.arg: self._value(each.value) for each in keywords if each.arg}

    def _follow(self, node: ast.expr | None) -> ast.expr | None:
        for _ in range(_DEEP):
            if not isinstance(node, ast.Name) or node.id not in self._names:
                break
            node = self._names[node.id]
        return node

    def _value(self, node: ast.expr | None, deep: int = _DEEP) -> Any:
        """What is written there; names inside of lists are followed, too, as long as that ends."""
        node = self._follow(node)
        if node is None:
            return None
        found: Any = ""
        if not isinstance(node, ast.List | ast.Tuple) or not deep:
            try:
                found = ast.literal_eval(node)
            except (ValueError, TypeError):
                found = Unread(ast.unparse(node))
        self._left -= len(repr(found))
        if self._left < 0:
            raise ValueError(f"{self._module}: its values are more than {MOST} characters of text")
        if isinstance(node, ast.List | ast.Tuple) and deep:
            found = [self._value(each, deep - 1) for each in node.elts]
            if any(isinstance(each, Unread) for each in found):
                return Unread(ast.unparse(node))
        return found

    def _model(self, node: ast.expr | None) -> Any:
        node = self._follow(node)
        if isinstance(node, ast.Call) and node.args and _called(node) == "from_pretrained":
            node = node.args[0]
        return self._value(node)

    def _data(self, node: ast.expr | None, asked: TrlJob) -> Any:
        """A data set as a hub id; what is done to its rows is told, not done."""
        split = ""
        for _ in range(_DEEP):
            if isinstance(node, ast.Name):
                asked.notes += [
                    f"{node.id} = {text}: {_NOT_DONE}, or map columns with columns = {{…}}"
                    for text in self._changed.get(node.id, ())
                ]
                node = self._follow(node)
            elif isinstance(node, ast.Subscript):
                split, node = str(self._value(node.slice)), node.value
            elif isinstance(node, ast.Call) and _called(node) != "load_dataset":
                asked.notes.append(f"{ast.unparse(node)}: {_NOT_DONE}")
                node = node.func.value if isinstance(node.func, ast.Attribute) else None
            else:
                break
        if not isinstance(node, ast.Call):
            return None if node is None else Unread(ast.unparse(node))
        given = {**dict(zip(("path", "name"), map(self._value, node.args), strict=False))}
        given |= self._keywords(node)
        name, config, split = given.get("path"), given.get("name"), given.get("split") or split
        if (files := given.get("data_files")) is not None:
            one = files.get(split or "train") if isinstance(files, dict) else files
            return one if isinstance(one, str) else Unread(ast.unparse(node))
        if not isinstance(name, str):
            return Unread(ast.unparse(node))
        return f"{name}:{config}:{split or 'train'}" if config else f"{name}:{split or 'train'}"

    def _rewards(self, node: ast.expr | None) -> list[Any]:
        node = self._follow(node)
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node] if node else []
        return [self._reward(each) for each in nodes]

    def _reward(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self._functions:
            return f"{self._module}:{node.id}"
        if isinstance(node, ast.Name) and node.id in self._imported:
            return self._imported[node.id]
        return self._value(node)


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
