"""Whatever stands in files, names and answers, a terminal gets text: nothing in it acts."""

import ast
import io
import json
import logging
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Command, Result, command_in
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from small_runs import RECIPE, TINY

import posttrain
from posttrain.config.toml import write_toml
from posttrain.track.safe_terminal import Terminal

# A colour, a link, a window title, a C1 introducer, text that runs backwards, a return, markup.
NASTY = "[red]\x1b[31m\x1b]8;;http://x\x07\x1b]0;t\x07\x9b2J\u202e\r\x08:smile:[/red]"
NAME = NASTY.replace("/", "|")  # as a file may be called
SOURCE = Path(posttrain.__file__).parent
DOOR = SOURCE / "track" / "safe_terminal.py"
PAGES = ("config/__main__.py", "track/diagnosis/__main__.py", "cli/explain.py")
"""Modules that print a page of our documentation when they are run by themselves."""
EXAMINER = "sandbox/examiner.py"
"""It prints in its own process, whose output no terminal has, for tests that look at it."""


def acting(text: str) -> list[str]:
    """The characters of a text that could do something to a terminal, but for the line feed."""
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return [c for c in text if c != "\n" and unicodedata.category(c) in hidden]


@pytest.fixture(autouse=True)
def _own_records() -> Iterator[None]:
    """The command line changes how this process logs; the next test does not want that."""
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """A command in a folder where every name and every text is nasty."""
    rows = [{"prompt": f"{n}+1= {NASTY}", "answer": f"{n + 1}{NASTY}"} for n in range(30)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"{NAME}.jsonl").write_text(text)
    given = [{**row, "completion": row["answer"]} for row in rows]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "own.py").write_text(
        f"def breaks(completion: str) -> float:\n    raise ValueError({NASTY!r} + completion)\n"
        f"def likes(completion: str) -> float:\n    return len(completion) / 100\n"
        f"globals()[{NASTY!r}] = likes\n"
    )
    values = {
        **RECIPE,
        "run": {"folder": f"runs/{NAME}"},
        "model": {"name": "tiny", "options": {**TINY, "max_positions": 256}},
        "task": {"name": "jsonl", "path": f"{NAME}.jsonl", "test_share": 0.2, "accuracy": "exact"},
        "rewards": {"exact": 1.0, f"own:{NASTY}": 1.0},
        "sft": {"epochs": 1},
        "rl": {**RECIPE["rl"], "steps": 2, "check": "warn"},
    }
    (tmp_path / f"{NAME}.toml").write_text(write_toml(values))
    return command_in(tmp_path, columns=120, monkeypatch=monkeypatch, capsys=capsys)


def harmless(result: Result, *, code: int, says: str = "") -> None:
    """The command ended as it should, and nothing that it printed can act."""
    said = result.out + result.err
    assert result.code == code, said
    assert not acting(said), acting(said)
    assert says in said


@pytest.mark.filterwarnings("ignore:.*characters that the tokenizer lacks")  # and so it does
def test_nothing_nasty_reaches_the_screen_in_a_run_and_after_it(
    command: Command, tmp_path: Path
) -> None:
    recipe, folder = f"{NAME}.toml", f"runs/{NAME}"
    harmless(command("run", recipe, "--dry-run"), code=0, says="[red]")
    harmless(command("run", recipe), code=0, says="\\x1b[31m")
    harmless(command("resume", folder), code=0, says="already finished")
    metrics = tmp_path / folder / "rl" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**line, f"={NASTY}": 1.0}) + "\n" for line in lines))
    harmless(command("run", recipe, "--rl.steps", "3", "--run.folder", f"{folder}2"), code=0)
    harmless(command("runs"), code=0, says="\\x1b[31m")
    harmless(command("runs", folder, f"{folder}2"), code=0, says="rl.steps")
    both = command("runs", folder, f"{folder}2", "--json")
    harmless(both, code=0)
    assert NAME in json.loads(both.out)["runs"][0]["path"]
    harmless(command("eval", folder, "--show", "2"), code=0, says="\\x1b[31m")
    harmless(command("generate", folder, NASTY, "--max-new-tokens", "4"), code=0)
    harmless(command("export", folder), code=0, says="written")
    page = (tmp_path / folder / "report.html").read_text()
    table = (tmp_path / folder / "report-rl-metrics.csv").read_text()
    assert "\\u001b[31m" in page
    assert not acting(page + table)
    assert "\n=" not in table
    assert ",=" not in table


def test_nothing_nasty_reaches_the_screen_in_a_check(command: Command) -> None:
    harmless(command("check", f"{NAME}.toml", "--fast"), code=0, says="\\x1b[31m")
    as_json = command("check", f"{NAME}.toml", "--fast", "--json")
    harmless(as_json, code=0)
    assert "\\x1b[31m" in json.dumps([line["text"] for line in json.loads(as_json.out)["lines"]])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([NASTY], 2),
        (["run", f"{NAME}.tom"], 2),
        (["run", f"{NAME}.toml", f"--rl.{NASTY}", "1"], 2),
        (["run", f"{NAME}.toml", "--rl.algorithm", NASTY], 2),
        (["run", f"{NAME}.toml", "--rl.steps", NASTY], 2),
        (["run", f"{NAME}.toml", "--model.name", NASTY], 2),
        (["run", f"{NAME}.toml", "--task.path", f"{NASTY}.jsonl"], 2),
        (["run", f"{NAME}.toml", f"--rewards.{NASTY}", "1"], 2),
        (["run", f"{NAME}.toml", f"--{NASTY}"], 2),
        (["check", NASTY], 2),
        (["explain", NASTY], 2),
        (["explain", NASTY, NASTY], 2),
        (["grade", NASTY, "given.jsonl"], 2),
        (["grade", "exact", NAME], 2),
        (["grade", f"own:{NASTY}", "given.jsonl", "--workers", "0"], 0),
        (["grade", "own:breaks", "given.jsonl", "--workers", "0"], None),
        (["grade", "exact", "given.jsonl", "--out", f"{NAME}.out"], 0),
        (["eval", NASTY, "--task", "arithmetic"], 2),
        (["generate", "tiny", NASTY, "--max-new-tokens", "3"], 0),
        (["generate", NASTY, "a"], 2),
        (["runs", NASTY], None),
        (["export", NASTY], 2),
        (["resume", NASTY], 2),
        (["model", "import", f"{NASTY}.gguf", "folder"], 2),
    ],
)
def test_what_was_typed_comes_back_as_text(
    command: Command, arguments: list[str], code: int | None
) -> None:
    result = command(*arguments)
    harmless(result, code=result.code if code is None else code, says="\\x1b[31m" if code else "")


def test_a_fault_of_ours_shows_its_traceback_as_text(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(names: object) -> None:
        raise TypeError(NASTY)

    monkeypatch.setattr("posttrain.cli.explain.explain", fault)
    harmless(command("explain"), code=1, says="TypeError: [red]\\x1b[31m")


def test_what_a_library_logs_is_text(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def log(names: object) -> None:
        logging.getLogger("some_library").warning("read %s", NASTY)

    monkeypatch.setattr("posttrain.cli.explain.explain", log)
    command("explain")
    assert not acting(caplog.text)


def test_a_terminal_with_colours_gets_no_code_but_our_own() -> None:
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=True, color_system="truecolor", width=100)
    table = Table(NASTY, title=NASTY, caption=NASTY)
    table.add_row(NASTY)
    # A panel takes a string for markup whatever the console says, so ours have a Text.
    with Live(Panel(NASTY, title=Text(NASTY)), console=console, refresh_per_second=1):
        console.print(NASTY, table, style="bold")
    ours = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r")
    left = ours.sub("", file.getvalue())
    assert not acting(left)
    assert left.count("[red]\\x1b[31m") >= 5
    assert "\x1b[31m" not in file.getvalue()
    assert ":smile:" in left


def test_nothing_prints_but_through_the_door() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = str(path.relative_to(SOURCE)) in (*PAGES, EXAMINER)
        if path == DOOR or own or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _prints(node.func):
                found.append(f"{path}:{node.lineno}")
    assert not found


def _prints(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"print", "Console", "echo", "secho"}
    name = ast.unparse(function)
    return name in {"typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write"}
