"""The built site in a browser: nothing comes from elsewhere, nothing sticks out, search finds."""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = ("", "tutorial/", "configuration/", "algorithms/", "algorithms/ppo/", "api/", "from_trl/")
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not SITE.exists(), reason="make site builds it"),
    pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_and_load_nothing_from_elsewhere(browser: Any, address: str, width: int) -> None:
    asked: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.on("request", lambda request: asked.append(request.url))
    notebooks = [f"notebooks/{path.name}/" for path in (SITE / "notebooks").iterdir()]
    for place in (*PAGES, *notebooks):
        page.goto(address + place)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
    assert len(notebooks) == 4
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    page.close()


def test_search_finds_a_key(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.keyboard.press("/")
    page.keyboard.type("missing_end_penalty")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    assert "configuration/" in page.locator(".md-search-result__list").inner_html()
    page.close()
