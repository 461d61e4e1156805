"""How large posttrain is: files and lines of each package, here or at another revision.

    python scripts/lines.py                  what stands here
    python scripts/lines.py --at 1b557a9     what stood there, beside it
    python scripts/lines.py --step           also the files that one GRPO step runs through

Lines are lines of text: code, docstrings, comments and blank ones alike. The core is everything but
the packages of ``NOT_CORE`` in tests/architecture_tables.py.

The files of a step: ``recipes/demo.toml`` of the revision is run for three steps of rl. While the
second is taken, a profile function of every thread (``sys.setprofile``, ``threading.setprofile``)
notes the file of each Python function that is called in this process; those of src/posttrain are
counted. A step lasts from the end of one ``on_step`` of ``pipelines.rl.train`` to the end of the
next: sampling, grading (what the worker processes run is not seen), collating, learning, syncing,
and all that is written down. What ran earlier and left only its result, a table say, is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from architecture_tables import NOT_CORE  # noqa: E402

Counts = Mapping[str, tuple[int, int]]
SETTINGS = ("--rl.steps", "3", "--sft.epochs", "1")
TRACE = """
import os, sys, threading
from posttrain.cli.app import main
from posttrain.pipelines import rl

files, taken, train = set(), [], rl.train

def note(frame, event, _):
    if len(taken) == 1 and event == "call":
        files.add(frame.f_code.co_filename)

def traced(*given, on_step, **more):
    def then(step):
        on_step(step)
        taken.append(step)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return train(*given, on_step=then, **more)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

rl.train = traced
with open(os.devnull, "w") as nowhere:
    sys.stdout = nowhere
    source, sys.argv = sys.argv[1], ["posttrain", *sys.argv[2:]]
    try:
        main()
    except SystemExit:
        pass
    sys.stdout = sys.__stdout__
for file in sorted(files):
    if file.startswith(source):
        print(file[len(source) + 1:])
"""


@contextlib.contextmanager
def tree(revision: str | None) -> Iterator[Path]:
    """A folder with the repository as it was at a revision; as it is here, for None."""
    if revision is None:
        yield ROOT
        return
    command = ["git", "-C", str(ROOT), "archive", revision, "src/posttrain", "recipes"]
    archive = io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=archive) as tar:
        tar.extractall(folder, filter="data")
        yield Path(folder)


def count(package: Path) -> Counts:
    """Files and lines of each package; the modules beside them are one row, ``(root)``."""
    files, lines = Counter[str](), Counter[str]()
    for path in package.rglob("*.py"):
        first, *rest = path.relative_to(package).parts
        name = first if rest else "(root)"
        files[name] += 1
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
    return {name: (files[name], lines[name]) for name in sorted(files)}


def table(columns: Mapping[str, Counts]) -> str:
    """The counts side by side, with the sums of the core and of everything."""
    names = sorted({name for counts in columns.values() for name in counts})
    parts = {name: [name] for name in names}
    parts |= {"core": [name for name in names if name not in NOT_CORE], "all": names}
    rows = ["package       " + "".join(f"{title:>18}" for title in columns)]
    for title, chosen in parts.items():
        row = f"{title:<14}"
        for counts in columns.values():
            files, lines = (sum(counts.get(name, (0, 0))[k] for name in chosen) for k in (0, 1))
            row += f"{files:>8,}{lines:>10,}"
        rows.append(row)
    return "\n".join(rows)


def files_of_a_step(folder: Path) -> list[str]:
    """The files of src/posttrain that the second RL step of the demo runs through."""
    source = (folder / "src" / "posttrain").resolve()
    with tempfile.TemporaryDirectory() as runs:
        recipe = str(folder / "recipes" / "demo.toml")
        command = [sys.executable, "-c", TRACE, str(source), "run", recipe, *SETTINGS]
        environment = {"PYTHONPATH": str(source.parent), "PATH": "/usr/bin:/bin", "HOME": runs}
        done = subprocess.run(
            [*command, "--run.folder", f"{runs}/demo"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return done.stdout.split()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--at", metavar="REVISION", help="a revision to compare with")
    parser.add_argument("--step", action="store_true", help="also the files of one GRPO step")
    given = parser.parse_args()
    columns, steps = {}, {}
    for revision in [*([given.at] if given.at else []), None]:
        with tree(revision) as folder:
            columns[revision or "here"] = count(folder / "src" / "posttrain")
            if given.step:
                steps[revision or "here"] = files_of_a_step(folder)
    print(table(columns))
    for title, files in steps.items():
        packages = Counter(file.split("/")[0] for file in files)
        told = ", ".join(f"{name} {number}" for name, number in packages.most_common())
        print(f"\none GRPO step, {title}: {len(files)} files ({told})")


if __name__ == "__main__":
    main()
