"""Help and mistakes come at once: nothing slow is loaded before they are told."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.algorithms import table
from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import Facts, facts
from posttrain.algorithms.weights import WEIGHTS
from posttrain.models.reward_scorer import reward_scorer
from posttrain.models.tiny import build_tiny
from posttrain.registry import options
from posttrain.rollout.engines import ENGINES
from posttrain.written import _WrittenFunction, _WrittenTable, written_table

SOURCE = Path(__file__).parent.parent / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}
SLOW = {"torch", "transformers", "sympy", "matplotlib", "pyarrow", "numpy", "tokenizers", "wandb"}
# Python's own, typer's and, for a recipe, pydantic's load in a third of a second; torch brings
# 1,500 more.
MOST_MODULES = 600

RECIPE = '[task]\nname = "arithmetic"\n\n[rl]\nsteps = 3\n'
RUN = ["run", "base.toml"]
ANSWERS: dict[str, tuple[list[str], int, str]] = {
    "help": (["--help"], 0, "walkthrough"),
    "help of a command": (["run", "--help"], 0, "--dry-run"),
    "no such command": (["ruin"], 2, "No such command 'ruin'"),
    "key": ([*RUN, "--rl.lerning_rate", "1"], 2, "did you mean learning_rate?"),
    "section": ([*RUN, "--rll.steps", "1"], 2, "unknown section; did you mean [rl]?"),
    "type": ([*RUN, "--rl.steps", "many"], 2, "must be a whole number of at least 1"),
    "rule": ([*RUN, "--rl.temperature", "0"], 2, "rl.temperature: 0 is greedy"),
    "file": (["run", "bse.toml"], 2, "no such recipe; did you mean 'base.toml'?"),
    "algorithm": ([*RUN, "--rl.algorithm", "gprp"], 2, "did you mean 'grpo'?"),
    "advantage": ([*RUN, "--rl.advantage", "gea"], 2, "did you mean 'gae'?"),
    "loss": ([*RUN, "--rl.loss", "cliped"], 2, "did you mean 'clipped'?"),
    "option of a loss": ([*RUN, "--rl.loss.clip_hgh", "1"], 2, "did you mean 'clip_high'?"),
    "weights": ([*RUN, "--rl.weights", "token_men"], 2, "did you mean 'token_mean'?"),
    "correction": ([*RUN, "--rl.correction", "truncate"], 2, "did you mean 'truncated'?"),
    "engine": ([*RUN, "--rl.engine", "nativ"], 2, "did you mean 'native'?"),
    "task": ([*RUN, "--task.name", "aritmetic"], 2, "did you mean 'arithmetic'?"),
    "option of a task": ([*RUN, "--task.digit", "1"], 2, "did you mean 'digits'?"),
    "reward": ([*RUN, "--rewards.numerc", "1"], 2, "did you mean 'numeric'?"),
    "reward model": ([*RUN, "--rewards.model.pth", "a"], 2, "did you mean 'path'?"),
    "size of tiny": ([*RUN, "--model.options.num_layer", "1"], 2, "did you mean 'num_layers'?"),
    "model folder": (
        [*RUN, "--model.name", "empty"],
        2,
        "model: 'empty' is not a model folder: no config.json",
    ),
    "teacher": (
        [*RUN, "--rl.algorithm", "distill", "--teacher.model", "./empt"],
        2,
        "teacher.model: there is no 'empt' in '.'; did you mean 'empty'?",
    ),
    "model to ask": (["generate", "empty", "hi"], 2, "model: 'empty' is not a model folder"),
    "model to measure": (
        ["eval", "./empt", "--task", "arithmetic"],
        2,
        "model: there is no 'empt' in '.'; did you mean 'empty'?",
    ),
    "eval": (["eval", "tiny", "--task", "aritmetic"], 2, "did you mean 'arithmetic'?"),
    "eval of no folder": (
        ["eval", "runs/x"],
        2,
        "runs/x: no such run folder, recipe or model folder here; a hub id needs --task",
    ),
    "resume of no folder": (["resume", "empt"], 2, "empt: no such folder; did you mean empty?"),
    "resume of no run": (["resume", "empty"], 2, "empty: is not a run folder"),
    "card of no run": (["card", "empty"], 2, "empty: is not a run folder"),
    "push of no run": (["push", "empt", "org/name"], 2, "empt: no such folder; did you mean empty"),
    "merge of no model": (["merge", "./empt", "out"], 2, "did you mean 'empty'?"),
    "export of no model": (["model", "export", "empty", "out.gguf"], 2, "no config.json"),
    "import of no file": (["model", "import", "none.gguf", "out"], 2, "there is no 'none.gguf'"),
    "serve no model": (["serve", "./empt"], 2, "did you mean 'empty'?"),
    "plan from no run": (
        ["plan", "base.toml", "--from", "empty"],
        2,
        "empty: is not a run folder",
    ),
    "result": (["reproduce", "dmo"], 2, "no such result; there are: demo"),
    "grade": (["grade", "numerc", "rows.jsonl"], 2, "did you mean 'numeric'?"),
    "tiny": (
        [*RUN, "--model.name", "tyni", "--model.options.num_layers", "1"],
        2,
        "model.name: there is no 'tyni' here; did you mean 'tiny'?",
    ),
    "option of a command": ([*RUN, "--dry-rn"], 2, "no option --dry-rn; did you mean --dry-run?"),
    "explain": (["explain", "gprp"], 2, "did you mean 'grpo'?"),
}
# A process of its own, which says at its end what it has loaded.
SCRIPT = """
import atexit, sys
atexit.register(lambda: print("\\nLOADED", sorted(sys.modules)))
sys.argv = ["posttrain", *{arguments!r}]
from posttrain.cli import main
main()
"""


def loaded(arguments: list[str], folder: Path) -> tuple[int, str, set[str]]:
    """The exit code of a command, what it said, and the modules it loaded."""
    script = SCRIPT.format(arguments=arguments)
    command, options = [sys.executable, "-c", script], {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=False, **options)
    said, _, modules = done.stdout.rpartition("\nLOADED ")
    return done.returncode, " ".join((said + done.stderr).split()), set(ast.literal_eval(modules))


@pytest.mark.parametrize("case", ANSWERS)
def test_nothing_slow_is_loaded_for_help_or_a_mistake(case: str, tmp_path: Path) -> None:
    arguments, code, words = ANSWERS[case]
    (tmp_path / "base.toml").write_text(RECIPE)
    (tmp_path / "empty").mkdir()
    found, said, modules = loaded(arguments, tmp_path)
    assert (found, words in said) == (code, True), said
    assert not SLOW & modules
    assert len(modules) < MOST_MODULES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.toml", "empty"]


@pytest.mark.parametrize("command", ["samples", "export", "runs", "view"])
def test_a_missing_run_is_told_without_torch(command: str, tmp_path: Path) -> None:
    """Of commands that read tables of a run, and load what reads these."""
    code, said, modules = loaded([command, "nothere"], tmp_path)
    assert (code, "nothere: no such folder" in said) == (2, True), said
    assert not {"torch", "transformers", "sympy"} & modules


def test_the_package_loads_torch_when_something_needs_it() -> None:
    script = (
        "import sys, posttrain; from posttrain import Prompt, Score; import posttrain.protocols\n"
        "assert 'torch' not in sys.modules\n"
        "from posttrain import Batch, Terms; from posttrain.types import Batch as same\n"
        "assert Batch is same and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True)


REAL: dict[table.PieceKind, Mapping[str, Any]] = {
    "advantage": ADVANTAGES,
    "policy loss": POLICY_LOSSES,
    "value loss": VALUE_LOSSES,
    "averaging": WEIGHTS,
    "correction": CORRECTIONS,
}
WRITTEN = {
    "ADVANTAGES": ("posttrain.algorithms.advantages", ADVANTAGES),
    "POLICY_LOSSES": ("posttrain.algorithms.losses", POLICY_LOSSES),
    "VALUE_LOSSES": ("posttrain.algorithms.losses", VALUE_LOSSES),
    "WEIGHTS": ("posttrain.algorithms.weights", WEIGHTS),
    "CORRECTIONS": ("posttrain.algorithms.corrections", CORRECTIONS),
    "ENGINES": ("posttrain.rollout.engines", ENGINES),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_as_written_is_the_table(name: str) -> None:
    """Names, options, their types and defaults; none of them has to be loaded to be known."""
    module, real = WRITTEN[name]
    written = _WrittenTable(module, name)
    assert list(written) == list(real)
    for row, function in real.items():
        read = _WrittenFunction(module, written._functions[row])
        assert options(read) == options(function), row


def test_a_function_as_written_is_the_function() -> None:
    for real in (reward_scorer, build_tiny):
        read = _WrittenFunction(real.__module__, real.__name__)
        assert options(read) == options(real)
        assert options(read)


def test_what_is_loaded_already_is_asked_itself() -> None:
    """Also where a test or a user has put something else in its place."""
    for kind, real in REAL.items():
        assert table.piece_table(kind) is real


def test_a_written_function_declares_what_the_real_one_does() -> None:
    """Its facts are not in the text that was read: asking for them loads the function."""
    read = _WrittenTable("posttrain.algorithms.advantages", "ADVANTAGES")
    for name, real in ADVANTAGES.items():
        written = _WrittenFunction("posttrain.algorithms.advantages", read._functions[name])
        assert facts(written) is facts(real) or facts(real) == Facts()
    script = (
        "import sys; from posttrain.written import real, written_table\n"
        "gae = written_table('posttrain.algorithms.advantages', 'ADVANTAGES')['gae']\n"
        "assert 'torch' not in sys.modules\n"
        "from posttrain.algorithms.pieces import facts\n"
        "assert 'values' in facts(gae).needs\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True)


def test_a_written_function_is_the_real_one_once_it_is_called() -> None:
    read = _WrittenTable("posttrain.algorithms.weights", "WEIGHTS")
    assert list(read) == list(written_table("posttrain.algorithms.weights", "WEIGHTS"))
    from posttrain.types import Batch

    batch = Batch.from_rewards([1.0, 2.0])
    function = _WrittenFunction("posttrain.algorithms.weights", "sequence_sum")
    assert function(batch, length=4).weights.tolist() == [[0.125], [0.125]]


def test_a_signature_that_the_text_does_not_tell_is_asked_of_the_function() -> None:
    """bradley_terry takes a tensor: only torch knows what that is."""
    from posttrain.written import written_function

    script = (
        "import sys; from posttrain.registry import options\n"
        "from posttrain.written import written_function\n"
        "read = written_function('posttrain.algorithms.losses', 'bradley_terry')\n"
        "assert 'torch' in sys.modules and list(options(read)) == ['margin']\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True)
    assert written_function("posttrain.algorithms.losses", "dpo").__name__ == "dpo"
