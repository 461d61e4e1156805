"""Who may ask, what they get, and what they never get."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import TOKEN, Served

from posttrain.viewer.page_answers import ANSWERS
from posttrain.viewer.shelf import Shelf, ShownRun, check_run

pytest.importorskip("fastapi")


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


def test_a_run_that_cannot_be_read_says_so_and_others_are_shown(hostile: Path) -> None:
    (hostile / "rl" / "metrics.jsonl").write_text("no\n")
    other = hostile.parent / "empty"
    other.mkdir()
    (other / "run.json").write_text("3")
    rows = {row["name"]: row for row in ANSWERS["runs"](Shelf([hostile.parent]), {})["runs"]}
    assert rows["hostile"]["state"] == "broken"
    assert "expected" in rows["hostile"]["problem"]
    assert rows["empty"]["state"] == "broken"


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
