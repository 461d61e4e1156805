"""Python as a tool: the code that a model writes runs in a sandbox, and its state is kept."""

from __future__ import annotations

import json

from posttrain.sandbox import Limits, choose, run
from posttrain.sandbox.choice import Choice

SHOWN = 4000  # characters of what a cell printed that the model reads
FINISHED = 3  # the status with which the driver ends: 0 is any cell's that ends the process

# Runs in the sandbox. Cells that ran before are run again, unheard, for the state they leave.
DRIVER = """
import ast, io, json, os, random, sys, traceback
*before, last = json.loads(sys.stdin.read())
names = {"__name__": "__main__"}
random.seed(0)

def cell(source, number):
    name = f"<cell {number}>"
    tree = ast.parse(source, name)
    ending = tree.body[-1] if tree.body else None
    if isinstance(ending, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), names)
    if isinstance(ending, ast.Expr):
        value = eval(compile(ast.Expression(ending.value), name, "eval"), names)
        if value is not None:
            print(repr(value))

def attempt(source, number):
    try:
        cell(source, number)
    except BaseException:
        kind, error, frames = sys.exc_info()
        while frames and not frames.tb_frame.f_code.co_filename.startswith("<cell"):
            frames = frames.tb_next
        print("".join(traceback.format_exception(kind, error, frames)), end="")

heard, output = sys.stdout, os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for number, source in enumerate(before, 1):
    sys.stdout = io.StringIO()
    attempt(source, number)
heard.flush()
os.dup2(output, 1)
sys.stdout = heard
attempt(last, len(before) + 1)
sys.stdout.flush()
raise SystemExit(3)
"""


class Python:
    """One tool, ``python``; the recipe's rewards score the last turn, which calls it no more.

    Each call runs in a new sandbox, without network, within ``seconds``, ``memory_mb`` and
    ``output_kb``: the cells that ran before are run again first, at most ``max_cells`` of them, so
    that their names are there. A cell that ran out of time or ended its process is forgotten.

    >>> env = Python(sandbox="none")
    >>> env.reset()
    >>> env.python("a = 20"), env.python("a += 1\\na * 2")
    ('(no output)', '42')
    """

    scores = False

    def __init__(
        self,
        *,
        sandbox: Choice = "auto",
        seconds: float = 5.0,
        memory_mb: int = 512,
        output_kb: int = 256,
        max_cells: int = 20,
    ) -> None:
        self._sandbox = choose(sandbox)
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb, output_kb=output_kb)
        self._max_cells = max_cells
        self._cells: list[str] = []

    def reset(self) -> None:
        """No cells yet."""
        self._cells = []

    def python(self, code: str) -> str:
        """Run Python code. Names stay defined from call to call.

        Args:
            code: The code; the value of its last line is shown, and what it prints.

        Returns:
            What was printed.
        """
        if len(self._cells) >= self._max_cells:
            raise ValueError(f"no more than {self._max_cells} calls")
        cells = json.dumps([*self._cells, code])
        outcome = run(DRIVER, cells, limits=self._limits, sandbox=self._sandbox)
        text = outcome.output.decode("utf-8", errors="replace").rstrip("\n")
        if outcome.ending != "finished" or outcome.status != FINISHED:
            ending = outcome.ending if outcome.ending != "finished" else "the process was ended"
            raise ValueError(f"{ending}; names are as they were before this call")
        self._cells.append(code)
        return shortened(text) or "(no output)"


def shortened(text: str) -> str:
    """A text that is not too long for a model to read: its beginning and its end.

    >>> len(shortened("a" * 10**6)) < 4100
    True
    """
    if len(text) <= SHOWN:
        return text
    left_out = len(text) - SHOWN
    return f"{text[: SHOWN // 2]}\n[{left_out:,} characters left out]\n{text[-SHOWN // 2 :]}"
