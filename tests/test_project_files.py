"""What those who join the project meet: one version, a changelog, the same checks everywhere."""

import ast
import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.cli.endings import needing_web_server

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
YAML = [
    ".pre-commit-config.yaml",
    "CITATION.cff",
    ".github/workflows/test.yml",
    ".github/ISSUE_TEMPLATE/bug.yml",
    ".github/ISSUE_TEMPLATE/idea.yml",
]


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_version_is_written_once() -> None:
    """As text in ``__init__``, which pyproject names: known without an install, or torch."""
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "posttrain.__version__"}
    written = [
        node.value.value
        for node in ast.parse(Path(posttrain.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
        if isinstance(node.value, ast.Constant)  # setuptools would import what is no constant
    ]
    assert written == [posttrain.__version__]
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / name for name in ("pyproject.toml", *YAML))]
    version = re.compile(rf"(version: |[\"']){re.escape(posttrain.__version__)}\b")
    found = [path.name for path in texts if version.search(path.read_text(encoding="utf-8"))]
    assert found == ["__init__.py"]


def test_the_command_tells_the_version_from_a_source_tree_alone(tmp_path: Path) -> None:
    """Where nothing is installed there is no metadata to ask, and torch is not asked either."""
    script = (
        "import sys, importlib.metadata as m\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.version = m.distribution = none\n"
        "sys.modules['torch'] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'src')!r}); sys.argv = ['posttrain', '--version']\n"
        "from posttrain.cli import main; main()\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"posttrain {posttrain.__version__}\n", "")


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.M)
    newest = [entry for entry in entries if entry[0] != "Unreleased"]
    assert newest[0][0] == posttrain.__version__
    for version, date in newest:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|not released yet", date), version
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_workflow_runs_what_a_contributor_runs() -> None:
    """On two versions of Python, with torch for a CPU."""
    job = loaded(".github/workflows/test.yml")["jobs"]["test"]
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert [words[:2] for words in commands].count(["make", "test"]) == 1
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert job["env"]["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"


def test_a_commit_is_checked_by_the_ruff_of_the_environment() -> None:
    """So that there is one pin, in constraints.txt."""
    repositories = loaded(".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    entries = [hook["entry"] for hook in repositories[0]["hooks"]]
    assert [entry.split()[:2] for entry in entries] == [
        [".venv/bin/ruff", "check"],
        [".venv/bin/ruff", "format"],
    ]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^ruff==", pins, re.M)) == 1


def test_citation_licence_and_addresses_agree() -> None:
    citation, project = loaded("CITATION.cff"), PROJECT["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "type"} <= citation.keys()
    assert citation["authors"] == project["authors"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    pages = [ROOT / "SECURITY.md", *(ROOT / ".github").rglob("*.yml")]
    for text in (page.read_text(encoding="utf-8") for page in pages):
        for address in re.findall(r"https://github\.com/posttrain[^\s)]*", text):
            assert address.startswith(project["urls"]["Source"] + "/")


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_an_issue_form_asks_for_something(name: str) -> None:
    form = loaded(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.parametrize("page", ["CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"])
def test_links_of_the_root_pages_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_without_triton_no_kernel_is_imported_for_its_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ignored = runpy.run_path(str(ROOT / "conftest.py"))["collect_ignore_glob"]
    kernels = sorted((ROOT / "src/posttrain/fast/kernels").glob("*.py"))
    needing = {path for path in kernels if "import triton" in path.read_text(encoding="utf-8")}
    assert {ROOT / name for name in ignored if "kernels" in name} == needing


def test_what_a_web_server_needs_is_named_as_the_extra_of_its_command() -> None:
    """The extra serve is that of view: one list of packages."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["serve"] == ["posttrain[view]"]
    for command in ("view", "serve"):
        assert command in extras
        told = rf"{command}: fastapi is not installed; run `pip install 'posttrain\[{command}\]'`"
        with pytest.raises(ValueError, match=told), needing_web_server(command):
            raise ModuleNotFoundError(name="fastapi")
