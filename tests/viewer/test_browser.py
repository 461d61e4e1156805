"""The page in a real browser: every view, live, by keyboard, under attack, and five questions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import TOKEN, Served

from posttrain.runs import Filter, Rollouts
from posttrain.track import Stage
from posttrain.track.jsonl import JsonlTracker
from posttrain.viewer.static_page import write_page

pytestmark = pytest.mark.browser
AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PLACE = "run=first&step=2&group=1&sample=0"
VIEWS = {
    "overview": "/overview?run=first",
    "overlay": "/overview?run=first&run=second",
    "groups": "/groups?run=first",
    "step": "/groups?run=first&first_step=5&last_step=5",
    "prompts": "/groups?run=first&view=prompts",
    "tokens": f"/tokens?{PLACE}",
    "explain": f"/explain?{PLACE}",
    "compare": "/compare?run=first",
    "two runs": "/compare?run=first&other=second",
    "try": "/try?run=first",
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs chromium: apt install chromium")
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=options)
        yield opened
        opened.close()


class Seen:
    """A page of the browser, and what it complained of."""

    def __init__(self, chromium: Any, **options: Any) -> None:
        self.context = chromium.new_context(**{"viewport": WIDE, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console", lambda line: self.errors.append(line.text) if line.type == "error" else None
        )
        self.page.on("request", lambda request: self.asked.append(request.url))

    def enter(self, served: Served) -> None:
        self.page.goto(f"{served.address}/?token={TOKEN}")
        self.page.wait_for_selector("nav.pages")

    def open(self, served: Served, path: str) -> None:
        self.page.goto(served.address + path)
        self.page.wait_for_load_state("networkidle")

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def reads(self, *words: str) -> None:
        """Wait until the page says so."""
        for each in words:
            says = "words => document.querySelector('main').innerText.includes(words)"
            self.page.wait_for_function(says, arg=each)


@pytest.fixture
def seen(chromium: Any, served: Served) -> Iterator[Seen]:
    """A browser that has entered."""
    found = Seen(chromium)
    found.enter(served)
    yield found
    found.context.close()


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_has_an_address_and_no_complaint(seen: Seen, served: Served, name: str) -> None:
    seen.open(served, VIEWS[name])
    wanted = {
        "overview": ["Held-out accuracy", "Healthy:", "Diagnosis"],
        "overlay": ["Settings", "Clip fraction"],
        "groups": ["Step 1", "mean reward", "Follow this prompt"],
        "step": ["Step 5", "steps before"],
        "prompts": ["best reward", "later − earlier"],
        "tokens": ["sample 0", "policy", "Log-prob"],
        "explain": ["Baseline", "Advantage", "Agrees with the learner", "Token by token"],
        "compare": ["won", "lost", "before", "after"],
        "two runs": ["first", "second", "3"],
        "try": ["Prompt", "Temperature"],
    }[name]
    seen.reads(*wanted)
    assert seen.errors == []
    assert all(url.startswith(served.address) for url in seen.asked)  # and nothing from elsewhere


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_it_is_readable_and_accessible(
    chromium: Any, served: Served, size: dict[str, int], scheme: str
) -> None:
    """Nothing is wider than the screen, and axe has no serious finding."""
    seen = Seen(chromium, viewport=size, color_scheme=scheme, bypass_csp=True)
    seen.enter(served)
    for name, path in VIEWS.items():
        seen.open(served, path)
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], (name, wide)
        if AXE.exists():
            seen.page.add_script_tag(path=str(AXE))
            found = seen.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            serious = [
                (each["id"], [node["html"][:120] for node in each["nodes"]][:3])
                for each in found["violations"]
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], (name, size, scheme)
    seen.context.close()


def test_tokens_are_coloured_by_what_is_chosen_and_show_their_numbers(
    seen: Seen, served: Served, runs: Path
) -> None:
    rows = Rollouts(runs / "first" / "rl").page(Filter(first_step=2), limit=50).rows
    long = next(row for row in rows if row["length"] > 1)
    place = "&".join(f"{name}={long[name]}" for name in ("step", "group", "sample"))
    seen.open(served, f"/tokens?run=first&{place}")
    for measure in ("Ratio", "Advantage", "Entropy", "Loss term"):
        seen.page.get_by_role("link", name=measure, exact=True).click()
        seen.page.wait_for_selector(f".switch a[aria-current]:text-is('{measure}')")
    assert "colour=term" in seen.page.url
    coloured = seen.page.eval_on_selector_all(
        ".token.active", "all => all.map(e => e.style.background)"
    )
    assert any("color-mix" in each for each in coloured)
    seen.page.get_by_role("link", name="Log-prob", exact=True).click()
    seen.page.wait_for_selector(".switch a[aria-current]:text-is('Log-prob')")
    likely = seen.page.eval_on_selector_all(
        ".token.active", "all => all.map(e => e.style.background)"
    )
    assert len(set(likely)) > 1  # of two tokens, too, the likelier one is paler
    seen.page.keyboard.press("ArrowRight")
    seen.page.wait_for_selector("aside dt:text-is('loss term ℓ')")
    seen.page.wait_for_function("document.querySelector('aside').innerText.includes('Token 1')")
    seen.page.keyboard.press("ArrowRight")
    seen.page.wait_for_function("document.querySelector('aside').innerText.includes('Token 2')")


def test_it_follows_a_run_that_goes_on(chromium: Any, runs: Path, tmp_path: Path) -> None:
    """Metrics that are appended, and rollouts that appear, are shown without a reload."""
    folder = tmp_path / "runs" / "live"
    shutil.copytree(runs / "first", folder)
    (folder / "summary.json").unlink()
    last = folder / "rl" / "rollouts" / "step-000006.parquet"
    kept = last.read_bytes()
    last.unlink()
    served = Served(folder.parent)
    seen = Seen(chromium)
    seen.enter(served)
    seen.open(served, "/groups?run=live&sort=step&descending=1")
    seen.reads("Step 5")
    assert "Step 6" not in seen.text()
    last.write_bytes(kept)
    tracker = JsonlTracker(Stage(name="rl", folder=folder / "rl", total_steps=9))
    tracker.log(7, {"reward/mean": 0.125})
    tracker.close()
    seen.reads("Step 6")
    seen.open(served, "/overview?run=live&stage=rl&smooth=0")
    seen.reads("0.125")
    tracker = JsonlTracker(Stage(name="rl", folder=folder / "rl", total_steps=9))
    tracker.log(8, {"reward/mean": 0.875})
    tracker.close()
    seen.reads("0.875")
    # Nor are the numbers of a token those of when it was first asked for.
    numbers = folder / "rl" / "tokens" / "step-000006.parquet"
    kept = numbers.read_bytes()
    numbers.unlink()
    seen.open(served, "/tokens?run=live&step=6&group=0&sample=0")
    seen.page.wait_for_selector(".switch span.off:text-is('Loss term')")
    numbers.write_bytes(kept)
    tracker = JsonlTracker(Stage(name="rl", folder=folder / "rl", total_steps=9))
    tracker.log(9, {"reward/mean": 0.5})
    tracker.close()
    seen.page.wait_for_selector(".switch a:text-is('Loss term')")
    seen.context.close()
    served.close()


def test_a_run_of_several_adapters_leads_to_each(chromium: Any, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "seeds"
    for number in (0, 1):
        shutil.copytree(runs / "first", folder / "adapters" / str(number))
    for name in ("run.json", "config.json"):
        shutil.copy(runs / "first" / name, folder / name)
    served = Served(folder)
    seen = Seen(chromium)
    seen.enter(served)
    seen.reads("seeds trained 2 adapters on one base")
    seen.page.get_by_role("link", name="all over each other").click()
    seen.reads("seeds/adapters/0", "seeds/adapters/1", "The runs have the same settings.")
    seen.open(served, "/groups?run=seeds")
    seen.page.get_by_role("link", name="seeds/adapters/1").click()
    seen.reads("Healthy:")
    assert seen.errors == []
    seen.context.close()
    served.close()


def test_it_is_used_by_keyboard_alone(seen: Seen, served: Served) -> None:
    press = seen.page.keyboard.press
    press("2")
    seen.page.wait_for_selector("#search")
    press("/")
    seen.page.wait_for_function("document.activeElement.id === 'search'")
    seen.page.keyboard.type("+")
    seen.page.wait_for_function("document.activeElement.value === '+'")
    press("Enter")
    seen.page.wait_for_url("**text=*")
    press("Escape")
    press("3")
    seen.page.wait_for_selector(".token.active")
    sample = seen.page.url
    press("]")
    seen.page.wait_for_function("old => location.href !== old", arg=sample)
    press("4")
    seen.page.wait_for_url("**/explain?*")
    press("5")
    seen.page.wait_for_url("**/compare?*")
    press("1")
    seen.page.wait_for_url("**/overview?*")
    seen.page.wait_for_selector(".plot svg")
    seen.page.locator(".plot svg").first.focus()
    for key in ("ArrowLeft", "ArrowLeft", "Enter"):
        press(key)
    seen.page.wait_for_url("**/groups?*first_step=*")
    press("?")
    seen.page.get_by_role("dialog").wait_for()
    press("Escape")
    seen.page.get_by_role("dialog").wait_for(state="detached")
    # Every control can be reached, and shows that it has the focus.
    press("Tab")
    outline = seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline not in ("none", "")


def test_hostile_text_stays_text(chromium: Any, served_hostile: Served) -> None:
    """Script, markup, escapes, text that runs backwards, and 300,000 characters."""
    seen = Seen(chromium)
    seen.enter(served_hostile)
    place = "run=hostile&step=1&group=0"
    views = ["/overview?run=hostile", "/groups?run=hostile", "/groups?run=hostile&view=prompts"]
    views += [f"/tokens?{place}&sample={sample}" for sample in (0, 1, 2)]
    views += [f"/explain?{place}&sample=0", "/compare?run=hostile", "/try?run=hostile"]
    for view in views:
        seen.open(served_hostile, view)
        assert not seen.page.evaluate("window.hacked"), view
        assert not set("\x1b\u202e") & set(seen.text()), view
        assert seen.page.locator("main script, main img, main iframe").count() == 0
        assert len(seen.page.content()) < 1_000_000, view
    seen.open(served_hostile, f"/tokens?{place}&sample=1")
    seen.reads("Its score broke (crashed", "none of its tokens is learned from")
    seen.open(served_hostile, "/groups?run=hostile")
    assert "<script>window.hacked=1</script>" in seen.text()  # it is shown, as what it is
    unexpected = [
        e for e in seen.errors if "404" not in e
    ]  # no tokens were recorded: said in words
    assert unexpected == []
    seen.context.close()


def test_another_site_cannot_read_a_run(chromium: Any, served: Served, tmp_path: Path) -> None:
    """A page of another origin, in a browser that has the cookie, gets nothing."""
    seen = Seen(chromium)
    seen.enter(served)
    foreign = Served(tmp_path)
    seen.page.goto(f"{foreign.address.replace('127.0.0.1', 'localhost')}/icon.svg")
    read = (
        "async ([url, mode]) => { try { return (await fetch(url, "
        "{credentials: 'include', mode})).status } catch { return 'refused' } }"
    )
    for mode in ("cors", "no-cors"):
        found = seen.page.evaluate(read, [f"{served.address}/api/runs", mode])
        assert found in ("refused", 0), mode
    seen.context.close()
    foreign.close()


def test_without_the_token_there_is_a_word_of_help(chromium: Any, served: Served) -> None:
    seen = Seen(chromium)
    seen.page.goto(served.address)
    seen.reads("it has the token")
    assert "first" not in seen.text()
    seen.context.close()


@pytest.mark.parametrize("which", ["runs", "hostile"])
def test_one_file_opens_from_disk_without_a_network(
    chromium: Any, which: str, request: Any, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(which)
    out = tmp_path / "page.html"
    write_page([folder], out)
    seen = Seen(chromium, offline=True)
    name = "first" if which == "runs" else "hostile"
    for view in ("/overview", "/groups", "/groups?view=prompts", "/tokens", "/explain", "/compare"):
        seen.page.goto(f"{out.as_uri()}#{view}{'&' if '?' in view else '?'}run={name}")
        seen.page.reload()
        seen.page.wait_for_selector("main > *")
        seen.page.wait_for_timeout(100)
        assert not seen.page.evaluate("window.hacked")
    assert [url for url in seen.asked if not url.startswith("file:")] == []
    if which == "runs":
        assert seen.errors == []
        seen.page.goto(f"{out.as_uri()}#/explain?run=first")
        seen.page.reload()
        seen.reads("Agrees with the learner")
        seen.page.goto(f"{out.as_uri()}#/groups?run=first&first_step=6&last_step=6")
        seen.page.reload()
        seen.reads("Step 6")
        assert "Step 1\n" not in seen.text()
    seen.context.close()


def test_samples_stream_in_with_their_alternatives(seen: Seen, served: Served) -> None:
    seen.open(served, "/try?run=first&samples=2&tokens=3&prompt=1%2B1%3D")
    seen.page.get_by_role("button", name="Sample").click()
    seen.reads("Sample 2")
    seen.page.locator("button.token").first.wait_for()
    seen.page.locator("button.token").first.focus()
    seen.reads("Instead of it")
    assert seen.page.locator(".alternatives li").count() >= 3


# ------------------------------------------------- what a newcomer asks, in at most three clicks


@pytest.fixture(scope="module")
def told(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run whose reward drops at step 4 while its diagnosis says that it hacks, and another."""
    folder = tmp_path_factory.mktemp("asked") / "runs"
    shutil.copytree(runs, folder)
    metrics = folder / "first" / "rl" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        if row["step"] == 4:
            row |= {"reward/mean": -3.0, "rollout/truncated": 0.9}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = {"finding": "hacking", "step": 4, "until": None, "text": "length rises alone"}
    path = folder / "first" / "rl" / "diagnosis.jsonl"
    path.write_text(json.dumps({**finding, "remedy": "Look at the answers."}) + "\n")
    os.utime(metrics)
    served = Served(folder)
    yield served
    served.close()


class Newcomer:
    """Clicks, and counts them."""

    def __init__(self, chromium: Any, served: Served) -> None:
        self.seen = Seen(chromium)
        self.seen.enter(served)
        self.page, self.clicks = self.seen.page, 0
        self.page.wait_for_selector(".plot svg")

    def click(self, where: Any, **options: Any) -> None:
        self.clicks += 1
        where.click(**options)

    def reads(self, *words: str) -> None:
        self.seen.reads(*words)
        assert self.clicks <= 3
        self.seen.context.close()


def test_why_did_the_reward_drop_at_step_4(chromium: Any, told: Served) -> None:
    asks = Newcomer(chromium, told)
    chart = asks.page.locator("section.chart").first.locator("svg").last
    box = chart.bounding_box()
    asks.click(chart, position={"x": 44 + (box["width"] - 54) * 4 / 6, "y": 60})
    asks.reads("Step 4", "lower", "rollout/truncated")


def test_which_prompts_are_never_solved(chromium: Any, told: Served) -> None:
    asks = Newcomer(chromium, told)
    asks.click(asks.page.get_by_role("link", name="Which prompts are never solved?"))
    asks.reads("prompts never reached the highest reward")


def test_is_it_hacking(chromium: Any, told: Served) -> None:
    asks = Newcomer(chromium, told)
    asks.seen.reads("length rises alone")  # the diagnosis says so at once
    asks.click(asks.page.get_by_role("link", name="Is it hacking?"))
    asks.reads("mean reward")


def test_what_did_this_token_get(chromium: Any, told: Served) -> None:
    asks = Newcomer(chromium, told)
    asks.click(asks.page.get_by_role("link", name="Tokens", exact=True))
    asks.click(asks.page.locator(".token.active").first)
    asks.reads("advantage", "w · ℓ, its part of the loss")


def test_is_run_b_better_than_a(chromium: Any, told: Served) -> None:
    asks = Newcomer(chromium, told)
    asks.click(asks.page.get_by_role("link", name="Is second better?"))
    asks.reads("of 10 problems")
