"""What is handed on of a run tells no folder of this machine and nobody's name."""

import json
from pathlib import Path

import pytest
from small_runs import TINY, make_teacher, recipe, small_run

from posttrain.cli.recipes import resume_run
from posttrain.runs import RunFolder
from posttrain.stages.whole.publish import prepare_publication
from posttrain.viewer.static_page import export

BROKEN = '''
"""A reward that cannot find its file."""


def lost(completion: str, prompt: str) -> float:
    if "1" in prompt:
        raise OSError("no /home/someone/a.json; file:///srv/someone/b.json, x=/srv/someone/c.json")
    return 0.0
'''


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run from a model, data and a reward of this machine, prolonged by its folder alone."""
    home = tmp_path_factory.mktemp("home of someone")
    model = make_teacher(home / "my models" / "small", **TINY)
    (home / "lost_answers.py").write_text(BROKEN)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (home / "my sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = recipe(home / "my runs" / "demo", sft=None, rl={"steps": 1, "max_invalid": 1.0})
    values["model"] = {"name": model}
    values["task"] = {"name": "file", "path": str(home / "my sums.jsonl"), "test_share": 0.2}
    values["rewards"] = {"numeric": {}, "lost_answers:lost": {"weight": 0.5}}
    values["grading"] = {"workers": 0}
    values["eval"] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(home)
        small_run(values)
        resume_run(home / "my runs" / "demo", ["--rl.steps", "2"], allow_changes=[])
    return RunFolder(home / "my runs" / "demo")


def check_handed_on(text: str, run: RunFolder) -> None:
    for local in ("someone", "/home", "/srv", "my runs", "my models", str(run.path)):
        assert local not in text, text[max(0, text.index(local) - 200) :][:400]


def test_the_page_and_the_numbers_beside_it_tell_no_folder(
    resumed: RunFolder, tmp_path: Path
) -> None:
    """Settings and reasons have the last part of each path, which says what it was."""
    written = export(resumed, tmp_path / "out" / "page.html")
    assert [path.suffix for path in written] == [".html", ".csv"]
    for path in written:
        check_handed_on(path.read_text(), resumed)
    page = written[0].read_text()
    assert "no a.json; b.json, x=c.json" in page
    for kept in ("demo", "small", "my sums.jsonl", "lost_answers:lost"):
        assert kept in page


def test_the_card_tells_no_folder(resumed: RunFolder) -> None:
    """Nor does a file of the model that is pushed with it."""
    ready = prepare_publication(resumed.path, "org/name")
    card = ready.card
    for path in (each for each in ready.upload.files if each.suffix != ".safetensors"):
        check_handed_on(path.read_text(), resumed)
    check_handed_on(card.replace("\\", ""), resumed)
    assert "no a.json; b.json, x=c.json" in card.replace("\\", "")
