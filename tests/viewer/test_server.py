"""Who may ask, what they get, and what they never get."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewed_runs import TOKEN, Served

from posttrain.runs import Filter
from posttrain.runs.rollouts import SCHEMA
from posttrain.viewer import shelf as shelf_module
from posttrain.viewer.page_answers import ANSWERS
from posttrain.viewer.rollout import explain_rollout, rollout_page
from posttrain.viewer.shelf import NotRecordedError, Shelf, ShownRun, UnknownError, check_run

pytest.importorskip("fastapi")

from posttrain.viewer import server, trying


def ask(
    served: Served, path: str, *, token: str = TOKEN, data: bytes | None = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, content and headers of an answer; the token is in its cookie."""
    given = {"Cookie": f"posttrain-{served.port}={token}", **headers}
    request = urllib.request.Request(served.address + path, data=data, headers=given)
    opener = urllib.request.build_opener(_Stay)
    try:
        with opener.open(request) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any) -> None:
        return None


def test_only_who_has_the_token_is_answered(served: Served) -> None:
    assert ask(served, "/api/runs")[0] == 200
    assert ask(served, "/api/runs", token="")[0] == 401
    assert ask(served, "/api/runs", token=TOKEN[:-1])[0] == 401
    assert ask(served, "/api/try", token="", data=b"{}")[0] == 401
    status, _, headers = ask(served, f"/groups?token={TOKEN}&text=a%26b", token="")
    assert (status, headers["location"]) == (303, "/groups?text=a%26b")
    assert "HttpOnly" in headers["set-cookie"]
    assert "samesite=strict" in headers["set-cookie"].lower()
    assert ask(served, "/?token=wrong", token="")[2]["set-cookie"] is None
    assert (
        ask(served, f"//evil.example/?token={TOKEN}", token="")[2]["location"] == "/evil.example/"
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_site_is_refused_though_it_has_the_cookie(
    served: Served, headers: dict[str, str]
) -> None:
    assert ask(served, "/api/runs", **headers)[0] == 403
    assert ask(served, "/api/try", data=b"{}", **headers)[0] == 403


def test_every_answer_says_what_the_page_may_do(served: Served) -> None:
    for path in ("/", "/api/runs", "/app.js", "/api/nothing", "/api/charts?run=none"):
        headers = ask(served, path)[2]
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/api/charts?run=../../etc",
        "/api/charts?run=first&stage=../../../etc",
        "/api/settings?run=%2e%2e%2ffirst",
        "/api/rollout?run=first/../second&step=1&group=0&sample=0",
        "/api/compare?run=first&other=/etc",
        "/api/models?run=..",
        "/api/../../etc/passwd",
    ],
)
def test_no_name_is_a_path(served: Served, path: str) -> None:
    status, body, _ = ask(served, path)
    assert status == 404 or b"<!doctype" in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "path", ["/../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/static/../../server.py"]
)
def test_a_page_is_one_of_the_built_files(served: Served, path: str) -> None:
    assert ask(served, path)[1].startswith(b"<!doctype html>")


def test_a_link_out_of_a_run_folder_is_not_followed(hostile: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text(json.dumps({"id": "x", "prompt": "secret"}) + "\n")
    shown = Shelf([hostile.parent]).look()[0]
    for name in ("rl/before.jsonl", "config.json", "rl/rollouts/step-000009.parquet"):
        place = hostile / name
        kept = place.read_bytes() if place.exists() else None
        place.unlink(missing_ok=True)
        os.symlink(secret, place)
        with pytest.raises(ValueError, match="is a link out of the run folder"):
            _ = shown.rollouts() if "rollouts" in name else shown.run
        place.unlink()
        if kept is not None:
            place.write_bytes(kept)
    os.symlink(hostile / "rl" / "metrics.jsonl", hostile / "rl" / "inside.jsonl")
    check_run(hostile)  # a link that stays inside is nobody's business
    elsewhere = tmp_path / "elsewhere"
    (hostile / "rl").rename(elsewhere)  # a link higher up, to a whole stage
    os.symlink(elsewhere, hostile / "rl")
    with pytest.raises(ValueError, match="is a link out of the run folder"):
        ShownRun("linked", hostile).rollouts()
    (hostile / "rl").unlink()
    elsewhere.rename(hostile / "rl")


@pytest.mark.parametrize(
    "path",
    [
        "groups?run=first&limit=99999",
        "groups?run=first&first_step=99999999999999999999",
        "groups?run=first&min_reward=nan",
        "groups?run=first&sort=__class__",
        "groups?run=first&offset=-5",
        "rollout?run=first&step=x&group=0&sample=0",
        "rollout?run=first&step=1&group=0&sample=99",
        "prompts?run=first&sort=position",
    ],
)
def test_what_makes_no_sense_is_bounded_or_refused(served: Served, path: str) -> None:
    status, body, _ = ask(served, f"/api/{path}")
    assert status in (200, 404, 422), body
    assert len(body) < 2_000_000
    if status != 200:
        assert set(json.loads(body)) == {"error"}


def test_every_question_of_the_page_is_answered(served: Served) -> None:
    place = "step=2&group=1&sample=0"
    paths = {
        "runs": "",
        "charts": "run=first&stage=rl",
        "step": "run=first&step=5",
        "settings": "many=first%0Asecond",
        "groups": "run=first&text=%2B",
        "prompts": "run=first",
        "rollout": f"run=first&{place}",
        "explain": f"run=first&{place}",
        "compare": "run=first&other=second",
        "models": "run=first",
    }
    assert paths.keys() == ANSWERS.keys()
    for name, asked in paths.items():
        status, body, headers = ask(served, f"/api/{name}?{asked}")
        assert (status, headers["content-type"]) == (200, "application/json"), (name, body)
        json.loads(body)


def test_a_model_answers_token_by_token(served: Served) -> None:
    asked = {"run": "first", "prompt": "1+1=", "samples": 2, "max_new_tokens": 3, "temperature": 0}
    status, body, _ = ask(served, "/api/try", data=json.dumps(asked).encode())
    events = [json.loads(line) for line in body.splitlines()]
    said = [event for event in events if "sample" in event]
    assert status == 200
    assert {event["sample"] for event in said} == {0, 1}
    for event in said:
        likeliest = event["top"][0]["probability"]
        assert event["probability"] == pytest.approx(likeliest)  # greedy
        assert 0 < sum(each["probability"] for each in event["top"]) <= 1 + 1e-9
    for wrong in (
        {"samples": 9},
        {"prompt": ""},
        {"temperature": -1},
        {"model": "/etc"},
        {"run": ".."},
    ):
        data = json.dumps({**asked, **wrong}).encode()
        assert ask(served, "/api/try", data=data)[0] in (404, 422), wrong


def test_the_page_is_answered_while_a_model_is_made_ready(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial imports torch, which takes seconds: others must not wait for it."""
    answered, waited = threading.Event(), []

    class Slow:
        def __init__(self) -> None:
            waited.append(answered.wait(20))

        def answer(self, *given: Any) -> Iterator[dict[str, Any]]:
            return iter([{"done": True}])

    monkeypatch.setattr("posttrain.viewer.trying.Answering", Slow)
    other = Served(served.folder)
    try:
        asked = json.dumps({"run": "first", "prompt": "1"}).encode()
        with ThreadPoolExecutor(1) as pool:
            trial = pool.submit(ask, other, "/api/try", data=asked)
            assert ask(other, "/api/settings?run=first")[0] == 200
            answered.set()
            assert trial.result()[0] == 200
        assert waited == [True]
        assert ask(other, "/api/try", data=b'{"prompt": "' + b"a" * 200_000 + b'"}')[0] == 422
    finally:
        other.close()


def test_what_cannot_be_read_as_a_prompt_is_told(served: Served) -> None:
    asked = json.dumps({"run": "first", "prompt": "half \ud800 a character"}).encode()
    status, body, _ = ask(served, "/api/try", data=asked)
    assert status == 200
    assert "error" in json.loads(body.splitlines()[-1])


def test_a_model_that_has_learned_on_is_loaded_again(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "first", tmp_path / "live")
    loaded: list[str] = []
    monkeypatch.setattr(trying, "LoadedPolicy", loaded.append)
    monkeypatch.setattr(trying, "sample", lambda policy, **given: iter([{"done": True}]))
    answering, run = trying.Answering(), Shelf([tmp_path / "live"]).get("live")
    asked = {"prompt": "1+1="}
    said = [len(list(answering.answer(run, asked))) for _ in range(2)]
    os.utime(tmp_path / "live" / "rl" / "model" / "model.safetensors", ns=(1, 1))
    said.append(len(list(answering.answer(run, asked))))
    assert said == [2, 1, 2]
    assert len(loaded) == 2


def test_an_answer_ends_where_its_client_goes_away() -> None:
    ended, begun = [], asyncio.Event()

    def lines() -> Generator[bytes, None, None]:
        try:
            while True:
                yield b"{}\n"
        finally:
            ended.append(True)

    async def receive() -> dict[str, Any]:
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            begun.set()
        await asyncio.sleep(0)

    kept = lines()  # so that it does not end because nobody knows it any more
    asyncio.run(server.StreamedLines(kept)({"type": "http"}, receive, send))
    assert ended == [True]


def test_a_run_that_was_deleted_is_not_there_any_more(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "first", tmp_path / "gone")
    shelf = Shelf([tmp_path])
    shelf.get("gone")
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(UnknownError, match="no run of this name"):
        ANSWERS["settings"](shelf, {"run": "gone"})


def test_a_run_that_cannot_be_read_says_so_and_others_are_shown(hostile: Path) -> None:
    (hostile / "rl" / "metrics.jsonl").write_text("no\n")
    other = hostile.parent / "empty"
    other.mkdir()
    (other / "run.json").write_text("3")
    rows = {row["name"]: row for row in ANSWERS["runs"](Shelf([hostile.parent]), {})["runs"]}
    assert rows["hostile"]["state"] == "broken"
    assert "expected" in rows["hostile"]["problem"]
    assert rows["empty"]["state"] == "broken"


def test_numbers_of_tokens_are_those_that_the_folder_has_now(runs: Path, tmp_path: Path) -> None:
    """A live page may ask before a step is written; a run that goes on may write it again."""
    folder = tmp_path / "live"
    shutil.copytree(runs / "first", folder)
    tokens = folder / "rl" / "tokens"
    other = (tokens / "step-000003.parquet").read_bytes()
    (tokens / "step-000002.parquet").rename(tmp_path / "later")
    shelf, asked = Shelf([folder]), {"run": "live", "step": "2", "group": "1", "sample": "0"}
    place = {"step": 2, "group": 1, "sample": 0}
    shown = shelf.get("live")

    def is_told() -> tuple[int | None, bool, float | None]:
        found = rollout_page(shown, **place)
        try:
            explained = ANSWERS["explain"](shelf, asked)
        except NotRecordedError:
            return found["optimiser_step"], "advantages" in found["columns"], None
        return found["optimiser_step"], "advantages" in found["columns"], explained["differs"]

    assert is_told() == (None, False, None)
    (tmp_path / "later").rename(tokens / "step-000002.parquet")
    _, has, differs = is_told()
    assert has
    assert differs["advantage"] < 1e-6
    replaced = tmp_path / "replaced"
    replaced.write_bytes(other)
    replaced.rename(tokens / "step-000002.parquet")  # as if from here on the run were another
    assert shown.tokens(2).facts["step"] == 2  # what the state was before step 3


def test_numbers_that_do_not_fit_their_rollout_are_not_shown(runs: Path, tmp_path: Path) -> None:
    """Between the moment that a step's rollouts are written again and that of its tokens."""
    folder = tmp_path / "live"
    shutil.copytree(runs / "first", folder)
    shown = ShownRun("live", folder)
    rows = shown.rollouts().page(Filter(first_step=2, last_step=2), columns=SCHEMA.names).rows
    path = folder / "rl" / "rollouts" / "step-000002.parquet"
    for row in rows:
        for name in ("completion_tokens", "sampler_logprobs"):
            row[name] = [*row[name], row[name][-1]]
        row["parts"] = list(row["parts"].items())
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    shown = ShownRun("live", folder)
    assert list(rollout_page(shown, step=2, group=1, sample=0)["columns"]) == ["sampler"]
    with pytest.raises(NotRecordedError, match="being written"):
        explain_rollout(shown, step=2, group=1, sample=0)


def test_runs_beyond_the_latest_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "MAX_RUNS", 3)
    for number in range(5):
        folder = tmp_path / "runs" / f"run{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"layout": 1}))
        os.utime(folder / "run.json", (number, number))
    found = ANSWERS["runs"](Shelf([tmp_path / "runs"]), {})
    assert [run["name"] for run in found["runs"]] == ["run2", "run3", "run4"]  # the latest
    assert found["left_out"] == 2


def test_many_ask_at_once_for_runs_that_have_just_appeared(tmp_path: Path) -> None:
    """Two requests that look together must not give one run two names, or break each other."""
    for number in range(60):
        (tmp_path / f"{number}" / "x").mkdir(parents=True)
    shelf = Shelf([tmp_path])
    for number in range(60):
        (tmp_path / f"{number}" / "x" / "run.json").write_text(json.dumps({"layout": 1}))
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = [each.result() for each in [pool.submit(shelf.look) for _ in range(16)]]
    finally:
        sys.setswitchinterval(old)
    for each in found:
        assert len({run.folder for run in each}) == len({run.name for run in each}) == 60


def test_an_adapter_is_named_with_its_run(tmp_path: Path) -> None:
    names = ["a", "b"]
    names += [f"{run}/adapters/{number}" for run in ("a", "b") for number in (0, 2, 10)]
    for name in names:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"layout": 1}))
    wanted = ["a", *(f"a/adapters/{number}" for number in (0, 2, 10))]
    assert [run.name for run in Shelf([tmp_path / "runs" / "a"]).look()] == wanted
    wanted += [name.replace("a", "b", 1) for name in wanted]
    assert [run.name for run in Shelf([tmp_path / "runs"]).look()] == wanted
    alone = Shelf([tmp_path / "runs" / "a" / "adapters" / "2"]).look()
    assert [run.name for run in alone] == ["a/adapters/2"]


def test_runs_that_cannot_be_compared_say_why(runs: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copytree(runs / name, tmp_path / name)
    shelf, asked = Shelf([tmp_path]), {"run": "first", "other": "second"}
    problems = tmp_path / "second" / "eval" / "problems.jsonl"
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    problems.write_text("".join(json.dumps({**r, "id": f"x{r['id']}"}) + "\n" for r in rows))
    assert "on other problems" in ANSWERS["compare"](shelf, asked)["missing"]
    problems.unlink()
    assert "second has no evaluation" in ANSWERS["compare"](shelf, asked)["missing"]


def test_two_folders_of_one_name_are_two_runs(hostile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "hostile"
    other.mkdir(parents=True)
    (other / "run.json").write_text(json.dumps({"layout": 1}))
    shelf = Shelf([hostile.parent, other.parent])
    found: list[ShownRun] = shelf.look()
    assert [run.name for run in found] == ["hostile", "hostile-2"]
    assert [run.folder for run in found] == [hostile, other]


def test_characters_of_several_tokens_are_whole_in_what_is_tried(tmp_path: Path) -> None:
    """The texts of the events add up to the answer."""
    from byte_models import SAID, taught_model

    from posttrain.stages.loaded.loaded_policy import LoadedPolicy as Policy
    from posttrain.viewer.trying import sample

    with Policy(taught_model(tmp_path / "model")) as policy:
        asked = {"prompt": "Speak.", "samples": 2, "max_new_tokens": 64, "seed": 0}
        events = list(sample(policy, temperature=0.0, **asked))
    for number in range(2):
        said = [event for event in events if event.get("sample") == number]
        assert "".join(event["text"] for event in said) == SAID
        assert [event["end"] for event in said] == [False] * (len(said) - 1) + [True]
    assert events[-1] == {"done": True, "cut": [False, False]}
