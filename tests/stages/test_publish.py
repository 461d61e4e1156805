"""A run on the hub: the real client against a hub of this machine, and the card it is given."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from command_line import command_in
from fake_hub import TOKEN, FakeHub, fake_hub
from small_runs import TINY, recipe, small_run

import posttrain
from posttrain.models.files.hub import plan_upload
from posttrain.report.facts import RunFacts
from posttrain.report.model_card import CardSource, escaped, fenced, model_card
from posttrain.stages.results import Run
from posttrain.stages.whole.publish import prepare_publication, push

# The hub's client warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
EVIL = "```\n---\n# Title\n<script>alert(1)</script> | a | [x](javascript:y) \x1b[31m `${HOME}`"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("published") / "run"
    done, _ = small_run(recipe(folder, grading={"workers": 0}))
    samples = [{"prompt": EVIL, "before": EVIL, "after": "ok", "answer": "3"}]
    done.folder.write_samples(samples)
    return done


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Its address and its token as a user sets them; no proxy, no Xet, which is the hub's own."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with fake_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


def metadata(card: str) -> dict[str, Any]:
    _, block, _ = card.split("---\n", 2)
    return yaml.safe_load(block)


def test_the_files_of_the_model_and_the_card_arrive(run: Run, hub: FakeHub) -> None:
    """Byte for byte; the weights by LFS. A repository that is there is left alone."""
    address = run.push("org/name", private=True)
    assert address == f"{hub.address}/org/name"
    assert hub.private == {"org/name"}
    files = hub.repositories["org/name"]
    kept = {path.name: path.read_bytes() for path in run.model.iterdir()}
    assert {name: files[name] for name in kept} == kept
    assert files.keys() - kept == {"README.md"}
    assert files["README.md"].startswith(b"---\n")
    assert any(line.startswith("PUT /store/") for line in hub.asked)
    with pytest.raises(ValueError, match=r"'org/name' is there already.*--update"):
        posttrain.push(run.folder.path, "org/name")
    posttrain.push(run.folder.path, "org/name", update=True)


def test_nothing_but_the_model_is_uploaded(run: Run, tmp_path: Path) -> None:
    """Neither states of an optimiser, rollouts and folders, nor what a link leads to."""
    model = tmp_path / "model"
    shutil.copytree(run.model, model)
    for name in ("optimizer.pt", "rollouts.parquet", ".env"):
        (model / name).write_text("secret")
    (model / "checkpoints").mkdir()
    (model / "model-00002.safetensors").symlink_to("/etc/passwd")
    plan = plan_upload(model, "org/name", texts={"README.md": "card"})
    assert plan.sizes().keys() == {path.name for path in run.model.iterdir()} | {"README.md"}
    assert {*plan.left_out} == {
        "optimizer.pt", "rollouts.parquet", ".env", "checkpoints", "model-00002.safetensors"
    }  # fmt: skip


def test_what_is_wrong_is_said_in_words(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"'name' is not a repository name; write ORG/NAME"):
        push(run.folder.path, "name")
    with pytest.raises(ValueError, match="the token may not write to 'others/name'"):
        push(run.folder.path, "others/name")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    with pytest.raises(ValueError, match=r"does not know the token.*hf auth login.*HF_TOKEN"):
        push(run.folder.path, "org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\)"):
        push(run.folder.path, "org/name")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"does not answer: .*nothing was uploaded"):
        push(run.folder.path, "org/name")
    assert hub.repositories == {}


def test_a_dry_run_shows_all_and_uploads_nothing(
    run: Run,
    hub: FakeHub,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)
    result = command("push", run.folder.path, "org/name", "--dry-run")
    assert result.code == 0, result.err
    assert re.search(r"to org/name, .* MB:", result.out)
    assert "model.safetensors" in result.out
    assert "nothing was uploaded" in result.out
    assert hub.asked == []
    result = command("card", run.folder.path, "card.md", "--license", "mit")
    assert (result.code, result.out.strip()) == (0, "card.md: written")
    card = (tmp_path / "card.md").read_text()
    assert metadata(card)["license"] == "mit"
    result = command("push", run.folder.path, "org/name")
    assert f"uploaded: {hub.address}/org/name" in result.out


def test_the_card_says_what_the_run_did(run: Run) -> None:
    """Numbers with intervals and over how many, seed, hardware, versions, recipe; no local path."""
    card = prepare_publication(run.folder.path, "org/name").card
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["posttrain", "sft", "rl"],
    }
    assert "| held\\-out accuracy" in card
    assert re.search(r"0\\.0% \\\(0\\\.0% to 27\\\.8%\\\)", card)
    assert "of 10 held-out problems" in card
    assert "* seed: 1" in card
    assert "* hardware: a CPU" in card
    assert re.search(r"\* versions: .*torch 2", card)
    assert 'algorithm = "grpo"' in card
    assert 'AutoModelForCausalLM.from_pretrained("org/name")' in card
    assert str(run.folder.path) not in card
    assert "/tmp" not in card


def test_the_card_says_what_the_diagnosis_knows(run: Run) -> None:
    """That a short run shows little, and what was found, with its name and its keys as code."""
    source = CardSource(repo="org/name", recipe="")

    def limits(**known: object) -> str:
        facts = RunFacts(run.folder)
        facts.__dict__.update(known)
        return model_card(facts, source).rpartition("## Limits")[2]

    assert re.search(
        r"no problem was found, but rl has \d steps?, too few to judge: some rules need 10\.",
        limits(findings=[]),
    )
    assert "no problem was found.\n" in limits(findings=[], unjudged="")
    finding = {"stage": "eval", "finding": "nothing_learned", "step": 8, "until": None}
    finding |= {"text": "it fell", "remedy": "Lower `rl.learning_rate`."}
    told = limits(findings=[finding])
    assert "too few to judge" in told
    line = "* eval nothing\\_learned, step 8 to the end\\: it fell\\. Lower "
    assert line + "<code>rl\\.learning\\_rate</code>\\." in told


def test_text_of_others_stays_text(run: Run) -> None:
    """No heading, fence, table, tag, link or end of the metadata comes of it."""
    source = CardSource(
        repo="org/name",
        recipe=f'[task]\npath = "{EVIL}"\n',
        base="a/b\n---\nlicense: stolen",
        data={"sft.data": EVIL, EVIL: "x"},
        versions={"torch": EVIL},
    )
    card = model_card(RunFacts(run.folder), source)
    assert metadata(card)["base_model"] == "a/b\n---\nlicense: stolen"
    assert "license" not in metadata(card)
    body = card.split("---\n", 2)[2]
    blocks = re.split(r"^(`{3,})\w*$(?:.*?)^\1$", body, flags=re.S | re.M)
    outside = "".join(part for part in blocks if not part.startswith("`"))
    assert "<script>" not in outside
    assert "](javascript" not in outside
    assert "\x1b" not in outside
    assert not re.search(r"^(```|---|# Title)", outside.replace("# name\n", ""), re.M)
    rows = [line for line in outside.splitlines() if line.startswith("| ") and "script" in line]
    assert rows
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    assert "````" in card  # the fence of the recipe, which holds one of three


def test_escaping() -> None:
    assert escaped("*a*_b_ <b> &amp; \\ [x](y) ~z~") == (
        "\\*a\\*\\_b\\_ &lt;b&gt; &amp;amp; \\\\ \\[x\\]\\(y\\) \\~z\\~"
    )
    assert len(escaped("x" * 500)) == 160
    assert fenced("a ````` b").startswith("``````\n")


def test_an_adapter_names_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is a folder of this machine: refused, unless it is named as the hub has it."""
    values = recipe(tmp_path / "run", rl=None, eval=None, grading={"workers": 0})
    values["model"] = {"name": "tiny", "options": TINY}
    values["adapter"] = {"rank": 2}
    done, _ = small_run(values)
    with pytest.raises(ValueError, match=r"--base-model ORG/NAME"):
        prepare_publication(done.folder.path, "org/name")
    ready = prepare_publication(done.folder.path, "org/name", base_model="org/base")
    assert metadata(ready.card)["base_model"] == "org/base"
    assert metadata(ready.card)["base_model_relation"] == "adapter"
    assert metadata(ready.card)["library_name"] == "peft"
    named = json.loads(ready.upload.texts["adapter_config.json"])
    assert named["base_model_name_or_path"] == "org/base"
    assert "adapter_model.safetensors" in ready.upload.sizes()
    assert str(tmp_path) not in "".join(ready.upload.texts.values())


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path, run: Run) -> None:
    shutil.copytree(run.folder.path, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="is not finished, so it has no results to report"):
        prepare_publication(tmp_path / "run", "org/name")
