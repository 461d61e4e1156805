"""src/posttrain keeps to its architecture, and each rule is seen catching a violation."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from architecture import RULES, check
from architecture_tables import CONFINED, MAX_CORE_LINES, MAX_FAN_OUT, MAX_FILE_LINES, MAX_MODULES

SOURCE = Path(__file__).parent.parent / "src"

LONG_FUNCTION = "def long() -> int:\n" + "    n = 0\n" * 59 + "    return n\n"
FULL_FUNCTION = (
    'def full() -> int:\n    """Say.\n' + "\n    more\n" * 60 + '    """\n'
    "    n = 0\n" + "    n = 1\n" * 57 + "    return n\n"
)

FEW = [f"from posttrain.tasks import task_{number}\n" for number in range(MAX_FAN_OUT)]

CLEAN = {
    "__init__.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from posttrain.build import build\n"
        "def __getattr__(name):\n    from posttrain.build import build\n    return build\n"
    ),
    "__main__.py": "from posttrain.cli.app import main\n",
    "types.py": "import torch\n" + "\n" * 299,
    "registry.py": "import inspect\n" + FULL_FUNCTION,
    "protocols.py": (
        "from typing import Protocol\nfrom posttrain import types\n"
        "class Engine(Protocol): ...\nclass Result: ...\n"
    ),
    "algorithms/__init__.py": "from . import ops\n",
    "algorithms/table.py": "row = {'name': 'gae'}\n",
    "algorithms/ops.py": "import math\nfrom ..types import Batch\nfrom torch import Tensor\n",
    "algorithms/losses/clip.py": "from ... import types\nfrom .. import ops\nfrom . import bound\n",
    "data/template.py": "import numpy\nimport transformers\n",
    "rewards/exact.py": "from posttrain.registry import build\n",
    "tasks/sums.py": "from posttrain.rewards.exact import exact\n",
    **{f"tasks/task_{number}.py": "" for number in range(MAX_MODULES - 1)},
    "report/pages.py": "".join(FEW),
    "stages/rl.py": "from posttrain.pipelines import rl\n",
    "models/heads.py": (
        "import torch\nfrom transformers import AutoModel\n"
        "class Head:\n"
        "    def forward(self, a, b, *, c): return self.eval()\n"
        "    @classmethod\n    def make(cls, a, b): return torch.load(a, weights_only=True)\n"
        "    @staticmethod\n    def join(a, b): return a\n"
        "    def __exit__(self, kind, value, trace): return None\n"
    ),
    "fast/kernels/rows.py": "import triton\n@triton.jit\ndef rows(a, b, c): ...\n",
    "fast/kernels/keys.py": "import triton\n@triton.jit(debug=True)\ndef keys(a, b, c): ...\n",
    "fast/score.py": "from posttrain.fast.kernels.rows import rows\n",
    "learn/learner.py": "from posttrain.fast.score import a\nfrom posttrain.fast import decode\n",
    "track/shown.py": "SHOWN = ('clipped', 'mine')\n",
    "walkthrough/sorting.py": "LOSS = 'naive'\n",
    "track/tensorboard.py": "from torch.utils.tensorboard import SummaryWriter\n",
    "rollout/engines/transformers.py": "def start():\n    import transformers\n",
    "runs/folder.py": "import pyarrow\nfrom posttrain import __version__\n",
    "report/terminal.py": "import rich\nfrom posttrain.runs import folder\n",
    "pipelines/rl.py": "import posttrain.algorithms.ops\nfrom posttrain.data import collate\n",
    "config/__init__.py": "import pydantic\n",
    "build.py": "from posttrain import config, pipelines, walkthrough\n",
    "cli.py": "import typer\nfrom posttrain import build, walkthrough\n",
}

# id: (rule, file, line of the violation, source)
VIOLATIONS = {
    "lower imports higher": ("layers", "types.py", 1, "import posttrain.algorithms\n"),
    "layer 2 imports layer 3": ("layers", "data/a.py", 1, "from posttrain.runs.b import c\n"),
    "runs import report": ("layers", "runs/a.py", 1, "from posttrain.report import facts\n"),
    "sibling, import": ("layers", "rollout/a.py", 1, "import posttrain.learn.learner\n"),
    "sibling, from": ("layers", "learn/a.py", 2, "\nfrom posttrain.rollout import b, c\n"),
    "sibling, from the root": ("layers", "models/a.py", 1, "from posttrain import data\n"),
    "sibling, relative": ("layers", "models/a.py", 1, "from ..data import collate\n"),
    "sibling, relative module": ("layers", "models/a/b.py", 1, "from ... import data\n"),
    "sibling, in a package": ("layers", "models/__init__.py", 1, "from ..data import b\n"),
    "rewards import tasks": ("layers", "rewards/a.py", 1, "import posttrain.tasks\n"),
    "the sandbox imports ours": ("layers", "sandbox/a.py", 1, "from posttrain.types import a\n"),
    "inside a function": ("layers", "registry.py", 2, "def f():\n    import posttrain.build\n"),
    "inside a method": (
        "layers",
        "track/a.py",
        3,
        "class A:\n    def f(self):\n        from posttrain.learn import b\n",
    ),
    "under TYPE_CHECKING": (
        "layers",
        "protocols.py",
        3,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from posttrain.data import b\n",
    ),
    "under try": (
        "layers",
        "types.py",
        2,
        "try:\n    import posttrain.cli\nexcept ImportError:\n    pass\n",
    ),
    "by name": (
        "layers",
        "types.py",
        2,
        "import importlib\nimportlib.import_module('posttrain.cli')\n",
    ),
    "as it is written": (
        "layers",
        "algorithms/table.py",
        2,
        "from posttrain.written import written_table\nwritten_table('posttrain.tasks', 'TASKS')\n",
    ),
    "pipelines import a backend": ("layers", "pipelines/rl.py", 1, "import posttrain.learn\n"),
    "pipelines import models": ("layers", "pipelines/rl.py", 1, "import posttrain.models\n"),
    "pipelines import config": ("layers", "pipelines/rl.py", 1, "import posttrain.config\n"),
    "config imports build": ("layers", "config/a.py", 1, "import posttrain.build\n"),
    "build imports check": ("layers", "build/a.py", 1, "import posttrain.check\n"),
    "build imports stages": ("layers", "build/a.py", 1, "from posttrain.stages import rl\n"),
    "check imports stages": ("layers", "check/a.py", 1, "import posttrain.stages.rl\n"),
    "stages import api": ("layers", "stages/a.py", 1, "from posttrain.api import rl\n"),
    "cli imports models": ("layers", "cli/app.py", 1, "import posttrain.models\n"),
    "through the public API": ("layers", "learn/a.py", 1, "from posttrain import Batch\n"),
    "the whole public API": ("layers", "learn/a.py", 1, "import posttrain\n"),
    "root loads something": ("layers", "__init__.py", 1, "from posttrain.types import b\n"),
    "unknown package": ("layers", "helpers.py", 1, "import math\n"),
    "past a door": ("doors", "learn/a.py", 1, "from posttrain.fast.packing import pack\n"),
    "past a door, from the package": ("doors", "rollout/a.py", 1, "from posttrain.fast import b\n"),
    "past a door, inside a function": (
        "doors",
        "build.py",
        2,
        "def f():\n    import posttrain.fast.kernels.draw\n",
    ),
    "an implementation in a stage": (
        "implementations",
        "stages/a.py",
        1,
        "from posttrain.learn.learner import LocalLearner\n",
    ),
    "an implementation by its module": (
        "implementations",
        "check/a.py",
        2,
        "from posttrain.learn import learner\ndef f(own: learner.LocalLearner): pass\n",
    ),
    "the fast way in models": ("layers", "models/a.py", 1, "import posttrain.fast.score\n"),
    "transformers in data": ("third_parties", "data/collate.py", 1, "import transformers\n"),
    "transformers in a function": (
        "third_parties",
        "learn/a.py",
        2,
        "def f():\n    from transformers import AutoModel\n",
    ),
    "a name that only begins alike": (
        "third_parties",
        "data/templates.py",
        1,
        "import transformers\n",
    ),
    "triton": ("third_parties", "models/heads.py", 1, "import triton.language as tl\n"),
    "wandb": ("third_parties", "track/console.py", 1, "import wandb\n"),
    "tensorboard": ("third_parties", "track/console.py", 1, "import tensorboard\n"),
    "torch's tensorboard": (
        "third_parties",
        "track/console.py",
        1,
        "from torch.utils.tensorboard import SummaryWriter\n",
    ),
    "matplotlib": ("third_parties", "pipelines/rl.py", 1, "import matplotlib.pyplot as plt\n"),
    "rich, runs": ("third_parties", "runs/a.py", 1, "from rich.table import Table\n"),
    "rich": ("third_parties", "pipelines/rl.py", 1, "from rich.table import Table\n"),
    "pydantic": ("third_parties", "runs/a.py", 1, "from pydantic import BaseModel\n"),
    "typer": ("third_parties", "build.py", 1, "import typer\n"),
    "pyarrow": ("third_parties", "models/a.py", 1, "import pyarrow.parquet\n"),
    "torch in the sandbox": ("third_parties", "sandbox/a.py", 1, "import torch\n"),
    "numpy in algorithms": ("third_parties", "algorithms/a.py", 1, "import numpy as np\n"),
    "numpy in the root": ("third_parties", "__init__.py", 1, "import numpy as np\n"),
    "unknown third party": ("third_parties", "data/a.py", 1, "import pandas\n"),
    "star import": ("star_imports", "data/a.py", 1, "from torch import *\n"),
    "401 lines": ("file_size", "data/a.py", 401, "n = 0\n" * 401),
    "61 lines": ("function_size", "data/a.py", 2, "\n" + LONG_FUNCTION),
    "61 lines, async": ("function_size", "data/a.py", 1, "async " + LONG_FUNCTION),
    "three parameters": ("keyword_only", "data/a.py", 1, "def f(a, b, c): ...\n"),
    "positional only": ("keyword_only", "data/a.py", 1, "def f(a, /, b, c): ...\n"),
    "three beyond self": (
        "keyword_only",
        "data/a.py",
        2,
        "class A:\n    def f(self, a, b, c): ...\n",
    ),
    "three, static": (
        "keyword_only",
        "data/a.py",
        3,
        "class A:\n    @staticmethod\n    def f(a, b, c): ...\n",
    ),
    "three, nested": ("keyword_only", "data/a.py", 2, "def f():\n    def g(a, b, c): ...\n"),
    "eval": ("unsafe_code", "rewards/a.py", 1, "eval('1')\n"),
    "eval, spelled out": (
        "unsafe_code",
        "rewards/a.py",
        2,
        "import builtins\nbuiltins.eval('1')\n",
    ),
    "exec": ("unsafe_code", "rewards/a.py", 1, "exec('1')\n"),
    "pickle": ("unsafe_code", "runs/a.py", 1, "import pickle\n"),
    "from pickle": ("unsafe_code", "runs/a.py", 1, "from pickle import loads\n"),
    "torch.load": ("unsafe_code", "learn/a.py", 2, "import torch\ntorch.load('a')\n"),
    "torch.load, unsafe": (
        "unsafe_code",
        "learn/a.py",
        2,
        "import torch\ntorch.load('a', weights_only=False)\n",
    ),
    "a piece by its name": (
        "piece_names",
        "build/a.py",
        2,
        "def f(rl):\n    return rl.loss['name'] == 'penalised'\n",
    ),
    "a piece by default": ("piece_names", "config/a.py", 1, "SPEC = {'name': 'truncated'}\n"),
    "a set of pieces": ("piece_names", "learn/a.py", 1, "CENTRED = {'group_centred'}\n"),
    "a protocol without a suite": (
        "contract_suites",
        "protocols.py",
        3,
        "from typing import Protocol\n\nclass Ghost(Protocol): ...\n",
    ),
    "16 modules of ours": (
        "fan_out",
        "report/pages.py",
        MAX_FAN_OUT + 2,
        "".join([*FEW, "def f():\n    import posttrain.tasks.sums\n"]),
    ),
    "21 modules": ("package_size", "tasks/task_z.py", 1, ""),
    "a name twice": ("own_names", "models/template.py", 1, ""),
    "a class name twice": ("own_names", "models/z.py", 2, "class _Inner: ...\nclass Head: ...\n"),
    "a core too large": ("core_size", "__init__.py", 1, "import os\n"),
    "load from torch": ("unsafe_code", "learn/a.py", 1, "from torch import load\n"),
}

# What the violation of a case needs beside its own file.
MORE = {
    "a class name twice": {"models/a.py": "class _Inner: ...\n"},
    "a core too large": {
        f"data/part_{number % 10}/lines_{number}.py": "\n" * MAX_FILE_LINES
        for number in range(MAX_CORE_LINES // MAX_FILE_LINES + 1)
    },
}


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Write a package named posttrain and return its folder."""
    root = folder / "posttrain"
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def load_alone(source: Path) -> subprocess.CompletedProcess[str]:
    """Import posttrain from ``source`` in a process that has no third party."""
    blocked = {name.split(".")[0] for name in CONFINED} | {"torch", "numpy"}
    script = f"import sys; sys.modules.update(dict.fromkeys({sorted(blocked)!r})); import posttrain"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_posttrain_keeps_to_its_architecture() -> None:
    violations = check(SOURCE / "posttrain")
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_importing_posttrain_needs_nothing() -> None:
    result = load_alone(SOURCE)
    assert result.returncode == 0, result.stderr


def test_a_clean_package_passes(tmp_path: Path) -> None:
    assert check(write_package(tmp_path, CLEAN)) == []


@pytest.mark.parametrize("case", VIOLATIONS)
def test_an_injected_violation_is_caught(case: str, tmp_path: Path) -> None:
    rule, name, line, source = VIOLATIONS[case]
    (violation,) = check(write_package(tmp_path, CLEAN | MORE.get(case, {}) | {name: source}))
    assert (violation.rule, violation.line) == (rule, line)
    assert str(violation).startswith(f"{tmp_path / 'posttrain' / name}:{line}: {rule}: ")


def test_every_rule_has_an_injected_violation() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, *_ in VIOLATIONS.values()}


@pytest.mark.parametrize("third_party", ["numpy", "torch", "transformers", "pydantic"])
def test_a_third_party_loaded_by_the_root_is_caught(third_party: str, tmp_path: Path) -> None:
    write_package(tmp_path, {"__init__.py": f"import {third_party}\n"})
    result = load_alone(tmp_path)
    assert result.returncode != 0
    assert third_party in result.stderr


def test_no_folder_is_left_out(request: pytest.FixtureRequest) -> None:
    """pytest skips folders by name, "build" among them unless told otherwise."""
    files = [*SOURCE.rglob("*.py"), *Path(__file__).parent.rglob("test_*.py")]
    names = {folder.name for file in files for folder in file.relative_to(SOURCE.parent).parents}
    assert {"build", "posttrain", "models"} <= names
    skipped = request.config.getini("norecursedirs")
    assert not [name for name in names for pattern in skipped if name and fnmatch(name, pattern)]
