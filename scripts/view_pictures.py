"""Pictures of every page of ``posttrain view``, light and dark, from a real run.

    python scripts/view_pictures.py RUN OUT_FOLDER

Needs the extra ``view``, Playwright and Debian's chromium. The rollout that is shown is one whose
group has the most different rewards, early in the training.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "posttrain", "view", str(asked.run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.match(r"(http://\S+)/\?token=\S+", server.stdout.readline())
            assert address is not None
            server.stdout.readline()
            take(address[0], address[1], run=asked.run.resolve().name, out=asked.out)
        finally:
            server.terminate()


def take(entry: str, base: str, *, run: str, out: Path) -> None:
    """Open every view in both schemes, and write ``view-NAME-SCHEME.png``."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 860}, color_scheme=scheme
            )
            page = context.new_page()
            page.goto(entry)
            found = page.request.get(
                f"{base}/api/groups?run={run}&first_step=3&last_step=20&sort=spread&descending=1"
                "&limit=1"
            ).json()["groups"][0]
            place = f"run={run}&step={found['step']}&group={found['group']}&sample=0"
            views = {
                "overview": f"/overview?run={run}",
                "groups": f"/groups?run={run}&first_step={found['step']}&last_step={found['step']}",
                "tokens": f"/tokens?{place}",
                "explain": f"/explain?{place}",
                "compare": f"/compare?run={run}",
                "try": f"/try?run={run}&prompt=7%2B8%2B9%3D",
            }
            for name, view in views.items():
                page.goto(base + view)
                page.wait_for_load_state("networkidle")
                acted(page, name)
                page.screenshot(path=out / f"view-{name}-{scheme}.png")
            context.close()
        browser.close()


def acted(page: Any, name: str) -> None:
    """What a picture needs beyond its address."""
    if name == "tokens":
        page.wait_for_selector(".token.active")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("aside dl")
    if name == "try":
        page.get_by_role("button", name="Sample").click()
        page.wait_for_selector("button.token.special", timeout=60_000)
        page.locator("button.token").first.hover()
        page.wait_for_selector(".alternatives")


if __name__ == "__main__":
    main()
