"""An engine of a user's own, with the signature that CONTRIBUTING.md gives."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import recipe

from posttrain.build.fingerprint import fingerprints
from posttrain.config import recipe_from_dict, resolve
from posttrain.runs.resume import stage_digests
from posttrain.stages.run import run

ENGINE = '''
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights


class Engine:
    """Samples as the native engine does, and counts."""

    def __init__(self, policy, decode, options):
        self.native = NativeEngine(policy.model, end_tokens=policy.end_tokens, decode=decode)
        self.version, self.options = 0, options
        made.append(self)
        self.calls = []

    def generate(self, prompts, sampling, *, num_samples, seed):
        self.calls.append(self.version)
        self.native.version = self.version
        return self.native.generate(prompts, sampling, num_samples=num_samples, seed=seed)

    def sync(self, learner):
        return SharedWeights(self)

    def close(self):
        closed.append(self)


made, closed = [], []


def make(policy, decode, *, options):
    return Engine(policy, decode, options)


def bare(policy, decode):
    return Engine(policy, decode, None)
'''


@pytest.mark.parametrize(
    ("spec", "options"),
    [({"name": "{}:make", "options": "these"}, "these"), ({"name": "{}:bare"}, None)],
)
def test_an_engine_gets_what_its_signature_asks_for(
    spec: dict[str, str],
    options: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is named in a recipe, checked, run for two steps and evaluated; nothing else is passed."""
    name = f"my_engine_{'with' if options else 'without'}"
    (tmp_path / f"{name}.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    given = recipe(
        tmp_path / "run",
        rl={"steps": 2, "check": "stop", "engine": {**spec, "name": spec["name"].format(name)}},
    )
    assert "rl.engine" in fingerprints(resolve(recipe_from_dict(given)))["contents"]
    done = run(recipe_from_dict(given), console=Console(file=io.StringIO()))
    module = __import__(name)
    assert [record["step"] for record in done.folder.stage("rl").records()] == [1, 2]
    assert all(engine.options == options for engine in module.made)
    assert [0, 1] in [engine.calls for engine in module.made]  # the loop: one batch a version
    assert module.closed == module.made  # of the check, of both evaluations and of the stage rl


def test_an_engine_that_lacks_a_method_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_an_engine.py").write_text("class make:\n    def __init__(self, *_): ...\n")
    given = recipe(tmp_path / "run", rl={"engine": "half_an_engine:make", "check": "off"})
    with pytest.raises(ValueError, match=r"a make has no generate and no sync and no close; docs/"):
        run(recipe_from_dict(given), console=Console(file=io.StringIO()))


def test_what_the_stage_rl_alone_uses_does_not_touch_the_stages_before() -> None:
    """An edited engine or loss is another rl, and the same sft."""
    config = {"run": {"seed": 0}, "model": {}, "contents": {"task.path": "a", "rl.engine": "b"}}
    edited = {**config, "contents": {"task.path": "a", "rl.engine": "c"}}
    stages = ("sft", "rl", "eval")
    before, after = stage_digests(config, stages), stage_digests(edited, stages)
    assert [name for name in stages if before[name] != after[name]] == ["rl", "eval"]
