"""The built page is that of the sources, small, and names no machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRONTEND = ROOT / "frontend"
STATIC = ROOT / "src" / "posttrain" / "viewer" / "static"


def test_the_built_files_are_those_of_the_sources() -> None:
    """As frontend/build.mjs notes; ``make view-assets`` builds them anew."""
    names = ["package.json", "package-lock.json", "tsconfig.json", "build.mjs"]
    names += [f"src/{path.name}" for path in (FRONTEND / "src").iterdir()]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\n".encode())
        digest.update((FRONTEND / name).read_bytes())
    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest()


def test_they_are_small_and_load_nothing_from_elsewhere() -> None:
    files = {path.name: path.read_bytes() for path in STATIC.iterdir()}
    assert set(files) == {"app.js", "app.css", "index.html", "icon.svg", "sources.sha256"}
    assert sum(map(len, files.values())) < 300_000
    for name in ("app.css", "index.html"):
        assert b"http" not in files[name], name
    assert b"innerHTML" not in b"".join(
        (FRONTEND / "src" / p.name).read_bytes() for p in (FRONTEND / "src").iterdir()
    )


def test_the_lock_file_names_no_machine() -> None:
    lock = json.loads((FRONTEND / "package-lock.json").read_text())
    for name, package in lock["packages"].items():
        where = package.get("resolved", "https://registry.npmjs.org/")
        assert where.startswith("https://registry.npmjs.org/"), name
        if name:
            assert "integrity" in package, name
