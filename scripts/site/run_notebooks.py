"""Executes notebooks/ and writes them back with what they printed.

    python scripts/site/run_notebooks.py [NAME …]
    python scripts/site/run_notebooks.py --check FILE.ipynb    # runs it here, and writes nothing

Each runs in an empty folder, with one thread, as the tests run them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from jupyter_client.manager import AsyncKernelManager

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def executed(path: Path, folder: Path, *, seconds: int = 600) -> Any:
    """A notebook after all its cells have run in ``folder``; the first that raises raises here."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(folder)])
    resources = {"metadata": {"path": str(folder)}}
    with tempfile.TemporaryDirectory() as sockets:  # files: no port is opened
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        nbclient.NotebookClient(
            notebook, km=kernel, timeout=seconds, startup_timeout=seconds, resources=resources
        ).execute()
    return notebook


def tidy(notebook: Any) -> Any:
    """Without what differs from run to run for no reason: ids, times and escape codes."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata = {}
        if "outputs" in cell:
            cell["outputs"] = _plain(cell["outputs"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _plain(outputs: list[Any]) -> list[Any]:
    """What was printed as one text: a terminal's lines come as many pieces of HTML."""
    kept: list[Any] = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text", data.get("text/plain", ""))
        if output.get("name") == "stderr" and "TqdmWarning" in text:  # ipywidgets is not there
            continue
        if "text" not in output and not data.get("text/html", "").startswith("<pre style"):
            kept.append(output)
            continue
        lines = (line.rstrip() for line in _ESCAPES.sub("", text).splitlines())
        plain = "\n".join(lines) + "\n"
        if kept and kept[-1].get("name") == "stdout":
            kept[-1]["text"] += plain
        else:
            kept.append(nbformat.v4.new_output("stream", name="stdout", text=plain))
    return kept


def main() -> None:
    """Run those that are named, or all; with --check, one in the current folder."""
    if sys.argv[1:2] == ["--check"]:
        executed(Path(sys.argv[2]), Path.cwd())
        return
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(tidy(executed(path, Path(folder))), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
