"""What the site needs beyond plain Markdown (the hooks of mkdocs.yml).

The pages link as files of the repository do, so that they read on GitHub: ``../src/…`` is a file
there. Here such a link becomes the repository's address, one to a notebook the page of that
notebook, and one to nothing a warning, which fails the strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from api_pages import api_pages
from notebook_pages import notebook_page

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).parents[2]
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "notebooks"
REPOSITORY = "https://github.com/posttrain/posttrain"
# A fenced block and code between backticks are left alone; group 1 is the target of a link.
_LINK = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)[ ]*$|`+[^`\n]+`+|\]\(([^)\s]+)\)", re.S | re.M)


def on_config(config: Any) -> Any:
    """Put the pages of the algorithms into the navigation, in the order of the overview."""
    overview = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    names = dict.fromkeys(re.findall(r"\]\((algorithms/\w+\.md)\)", overview))
    for section in config.nav:
        pages = section.get("Algorithms") if isinstance(section, dict) else None
        if pages and "algorithms/*" in pages:
            place = pages.index("algorithms/*")
            each = [{Path(name).stem: name} for name in names]
            pages[place : place + 1] = [{"One page each": each}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here: of notebooks, and of docstrings."""
    from mkdocs.structure.files import File

    made = {
        f"notebooks/{path.stem}.md": notebook_page(path)
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    }
    for uri, text in {**made, **api_pages(ROOT / "src" / "posttrain")}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links as the site has them; what leads nowhere is told."""
    uri = page.file.src_uri
    text, lost = relinked(markdown, uri, source=source_of(uri))
    for target in lost:
        log.warning(f"{uri}: the link {target} leads to no file of the repository")
    return text


def source_of(uri: str) -> Path:
    """The file of the repository that a page of the site is made of."""
    if uri.startswith("notebooks/"):
        return NOTEBOOKS / Path(uri).with_suffix(".ipynb").name
    return DOCS / uri


def relinked(text: str, uri: str, *, source: Path) -> tuple[str, list[str]]:
    """Markdown whose links are those of the site, and the targets that are not there.

    Links from one page of docs/ to another stay: mkdocs follows them itself, anchors too.
    """
    lost: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        target = found[1]
        if target is None or re.match(r"[a-z]+:|#|//", target):
            return found[0]
        name, mark, anchor = target.partition("#")
        path = (source.parent / name).resolve()
        if not path.exists() and not (path.is_relative_to(DOCS) and source.is_relative_to(DOCS)):
            lost.append(target)
        return f"]({_address(path, uri, inside=source.is_relative_to(DOCS)) or name}{mark}{anchor})"

    return _LINK.sub(replaced, text), lost


def _address(path: Path, uri: str, *, inside: bool) -> str:
    """Where the site has a file; "" where the link is right as it stands."""
    if path.is_relative_to(DOCS):
        if inside:
            return ""
        return posixpath.relpath(path.relative_to(DOCS).as_posix(), posixpath.dirname(uri))
    if path.parent == NOTEBOOKS and path.suffix == ".ipynb":
        return posixpath.relpath(f"notebooks/{path.stem}.md", posixpath.dirname(uri))
    if not path.is_relative_to(ROOT):
        return ""
    kind = "tree" if path.is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
