"""A damaged file ends a command with one paragraph: which file, what is wrong, what to do."""

import gzip
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import Command, command_in
from safetensors.torch import load_file, save_file
from small_runs import TINY, recipe, small_run

from posttrain.models.load import load_policy
from posttrain.models.reward import load_reward, reward_from_policy, save_reward
from posttrain.models.save import save_policy
from posttrain.runs.manifest import write_manifest

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
PROJECTION = "model.layers.1.mlp.up_proj.weight"
OVER = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as it should be."""
    folder = tmp_path_factory.mktemp("model") / "good"
    save_policy(load_policy("tiny", options=TINY), folder)
    return folder


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run a command in an empty folder."""
    return command_in(tmp_path, columns=120, monkeypatch=monkeypatch, capsys=capsys)


class Bomb:
    """Whoever unpickles it leaves a file behind."""

    def __reduce__(self) -> object:
        return os.mkdir, ("unpickled",)


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def text(name: str, content: str, *, encoding: str = "utf-8") -> Damage:
    return lambda folder: (folder / name).write_text(content, encoding=encoding)


def flip(name: str, byte: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[byte] ^= 0x40
        (folder / name).write_bytes(content)

    return damage


def weights(change: Callable[[Tensors], object]) -> Damage:
    def damage(folder: Path) -> None:
        # Copies: a file that is mapped into memory must not be written.
        held = {name: value.clone() for name, value in load_file(folder / WEIGHTS).items()}
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb()))


def index(places: Callable[[list[str]], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        (folder / INDEX).write_text(json.dumps(places(list(load_file(folder / SHARD)))))

    return damage


def shards(names: list[str], **others: str) -> dict[str, object]:
    return {"metadata": {}, "weight_map": {**dict.fromkeys(names, SHARD), **others}}


# What is done to a model folder, and what the message says beside the name of the file.
MODELS: dict[str, tuple[Damage, str, str]] = {
    "weights cut off": (cut(WEIGHTS, 5000), WEIGHTS, "is damaged"),
    "weights empty": (cut(WEIGHTS, 0), WEIGHTS, "is damaged"),
    "weights are text": (text(WEIGHTS, "hello " * 999), WEIGHTS, "is damaged"),
    "weights are pickled": (pickled, WEIGHTS, "is damaged"),
    "a bit of the header": (flip(WEIGHTS, 20), WEIGHTS, "is damaged"),
    "weights of another shape": (
        weights(lambda held: held.update({PROJECTION: torch.zeros(3, 5)})),
        "damaged",
        f"({PROJECTION}: [3, 5], not [128, 32])",
    ),
    "a weight missing": (weights(lambda held: held.pop(PROJECTION)), "damaged", "lacks 1 weights"),
    "a weight over": (
        weights(lambda held: held.update({OVER: torch.ones(128, 32)})),
        "damaged",
        f"config.json knows nothing of ({OVER})",
    ),
    "weights as whole numbers": (
        weights(lambda held: held.update({PROJECTION: held[PROJECTION].to(torch.int8)})),
        WEIGHTS,
        f"keeps {PROJECTION} as I8",
    ),
    "a weight that is no number": (
        weights(lambda held: held[PROJECTION].fill_(float("nan"))),
        "damaged",
        f"{PROJECTION} holds NaN",
    ),
    "fewer layers in the config": (config(num_hidden_layers=1), "damaged", "knows nothing of"),
    "more layers in the config": (config(num_hidden_layers=4), "damaged", "lacks 18 weights"),
    "another width in the config": (config(hidden_size=64), "damaged", "have another shape"),
    "a width that is none": (config(hidden_size="wide"), "damaged", "hidden_size"),
    "an activation that is none": (config(hidden_act="none"), "damaged", "cannot be read"),
    "a model that is none": (config(model_type="none"), "damaged", "model type `none`"),
    "an index of absent files": (
        index(lambda names: shards(names, more="model-00002-of-00002.safetensors")),
        INDEX,
        "names 1 files that are not in the folder (model-00002",
    ),
    "an index of absent weights": (
        index(lambda names: shards(names, more=SHARD)),
        INDEX,
        f"(more in {SHARD})",
    ),
    "an index that leads outside": (
        index(lambda names: {"weight_map": dict.fromkeys(names, f"../good/{WEIGHTS}")}),
        INDEX,
        "not in the folder (../good/",
    ),
    "an index without a map": (index(lambda names: {}), INDEX, "no table 'weight_map'"),
    "an index that is a list": (index(lambda names: names), INDEX, "holds no JSON object"),
    "a tokenizer of another kind": (
        text("tokenizer.json", '{"a": 1}'),
        "tokenizer.json",
        "no table 'model'",
    ),
    **{
        f"{name} {what}": (text(name, content, encoding=encoding), name, says)
        for name in ("config.json", "generation_config.json", "tokenizer.json")
        for what, content, encoding, says in [
            ("empty", "", "utf-8", "is empty"),
            ("cut off", '{"a": ', "utf-8", "is not JSON"),
            ("a list", "[]", "utf-8", "holds no JSON object"),
            ("null", "null", "utf-8", "holds no JSON object"),
            ("NUL bytes", "\0\0\0", "utf-8", "is not JSON"),
            ("UTF-16", "{}", "utf-16", "is not JSON"),
        ]
    },
}


def refused(command: Command, *arguments: object, name: str, says: str) -> None:
    """One paragraph with the name of the file; nothing was unpickled, and no one else spoke."""
    code, out, error = command(*arguments)
    assert code == 2, out + error
    assert error.startswith("posttrain: ")
    assert error.count("\n") == 1, error
    assert name in error
    assert says in error
    assert "; " in error  # and what to do
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_folder_is_named(
    posttrain: Command, good: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(good, folder)
    spoil, name, says = MODELS[damage]
    spoil(folder)
    refused(posttrain, "generate", folder, "2+3=", name=name, says=says)


@pytest.mark.parametrize(
    "damage", ["weights cut off", "weights of another shape", "config.json empty"]
)
def test_a_damaged_reward_model_is_named(good: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    save_reward(reward_from_policy(load_policy(str(good)), seed=0), folder)
    load_reward(str(folder))
    spoil, name, says = MODELS[damage]
    spoil(folder)
    with pytest.raises(ValueError, match=r"^reward model: ") as caught:
        load_reward(str(folder))
    assert name in str(caught.value)
    assert says in str(caught.value)


def gguf(magic: bytes = b"GGUF", *, version: int = 3, facts: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", magic, version, 0, facts) + rest


GGUF = {
    "empty": (b"", "is empty"),
    "cut off": (b"GGUF", "cut off"),
    "text": (b"hello " * 99, "begins with b'hello he'"),
    "another magic": (gguf(b"FUGG", rest=bytes(99)), "begins with b'FUGG"),
    "another version": (gguf(version=77), "cannot be read"),
    "facts cut off": (gguf(facts=9), "cannot be read"),
    "too many facts": (gguf(facts=2**40, rest=bytes(99)), "cannot be read"),
    "a pickle": (pickle.dumps(Bomb()), "begins with"),
}


@pytest.mark.parametrize("damage", GGUF)
def test_a_damaged_gguf_file_is_named(posttrain: Command, tmp_path: Path, damage: str) -> None:
    pytest.importorskip("gguf")
    content, says = GGUF[damage]
    (tmp_path / "small.gguf").write_bytes(content)
    refused(posttrain, "generate", "small.gguf", "2+3=", name="small.gguf", says=says)
    refused(posttrain, "model", "import", "small.gguf", "new", name="small.gguf", says=says)
    assert not Path("new").exists()


ROW = '{"completion": "5", "answer": "5"}\n'


DATA = {
    "empty": (b"", "holds no rows"),
    "a NUL byte": (ROW.encode() + b'{"completion": "a\0b"}\n', ":2: NUL bytes"),
    "UTF-16 without a mark": (ROW.encode("utf-16-le"), "NUL bytes"),
    "UTF-16": (ROW.encode("utf-16"), "is UTF-16 text"),
    "Latin-1": (ROW.encode() + b'{"completion": "\xff"}\n', ":2: not UTF-8"),
    "gzip": (gzip.compress(ROW.encode()), "is a gzip archive"),
    "Parquet": (b"PAR1" + bytes(99), "damaged or cut short"),
    "zip": (b"PK\x03\x04" + bytes(99), "is a zip archive"),
    "cut off": (ROW.encode() + b'{"completion": "5"', ":2: not valid JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "a huge line": (b'{"completion": "' + b"5" * (65 * 2**20), "a line of more than 64 MiB"),
    "a pickle": (pickle.dumps(Bomb()), "is a pickle"),
}


@pytest.mark.parametrize("damage", DATA)
def test_a_damaged_data_file_is_named(posttrain: Command, tmp_path: Path, damage: str) -> None:
    content, says = DATA[damage]
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused(posttrain, "grade", "exact", "rows.jsonl", name="rows.jsonl", says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no stage to run"),
        ("\0", "recipe.toml"),
        ('[rl]\nsteps = "', "recipe.toml"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_a_damaged_recipe_is_named(
    posttrain: Command, tmp_path: Path, content: str | bytes, says: str
) -> None:
    given = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "recipe.toml").write_bytes(given)
    code, _, error = posttrain("run", "recipe.toml")
    assert (code, "Traceback" in error) == (2, False)
    assert says in error


# What stands in the place of the optimiser's moments, and what is said of it.
OPTIMISERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:500]), "is damaged"),
    "a pickle": (lambda file: file.write_bytes(pickle.dumps(Bomb())), "is damaged"),
    "no tensors": (lambda file: save_file({}, file), "holds no moments"),
    "a model's weights": (
        lambda file: shutil.copy(file.parent / "model" / WEIGHTS, file),
        "which is not trained here",
    ),
    "other shapes": (
        lambda file: save_file(
            {n: torch.zeros(3, 5) if v.ndim else v for n, v in _held(file).items()}, file
        ),
        "has the shape [3, 5]",
    ),
    "half of the moments": (
        lambda file: save_file(dict(sorted(_held(file).items())[1:]), file),
        "some weights lack moments",
    ),
}


def _held(file: Path) -> Tensors:
    return {name: value.clone() for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after each step of rl."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    given = recipe(folder, sft=None, eval=None, rl={"save_every": 1, "steps": 2})
    small_run(given)
    return folder


@pytest.mark.parametrize("damage", OPTIMISERS)
def test_moments_that_are_none_are_named(
    posttrain: Command, saved: Path, tmp_path: Path, damage: str
) -> None:
    """Also where someone has written the list of hashes anew."""
    spoil, says = OPTIMISERS[damage]
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for checkpoint in (folder / "rl" / "checkpoints").iterdir():
        spoil(checkpoint / "optimizer.safetensors")
        write_manifest(checkpoint)
    for left in ("rl/done.json", "summary.json"):  # as if it had been cut short before its end
        (folder / left).unlink()
    refused(posttrain, "resume", folder, name="optimizer.safetensors", says=says)


@pytest.mark.parametrize("content", ["[]", "{}"])
@pytest.mark.parametrize(
    "name", ["config.json", "summary.json", "threads.json", "places.json", "rl/done.json"]
)
def test_a_damaged_record_of_a_run_is_named(
    posttrain: Command, saved: Path, tmp_path: Path, *, name: str, content: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / name).write_text(content)
    said = ""
    for command in (("resume", folder), ("runs", folder), ("card", folder), ("samples", folder)):
        code, shown, error = posttrain(*command)
        assert (code in (0, 2), "Traceback" in error) == (True, False), error
        said += shown + error
    kept = name == "threads.json" or (not name.startswith(("config", "rl")) and content == "{}")
    assert kept or Path(name).name in said  # what nobody reads is no one's error


def test_a_run_without_its_config_is_named(posttrain: Command, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    for command in ("resume", "card"):
        code, _, error = posttrain(command, tmp_path / "run")
        assert (code, "has no config.json" in error) == (2, True)
