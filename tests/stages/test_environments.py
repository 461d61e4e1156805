"""Runs with an environment: cut short between two turns' worth of steps, they go on exactly."""

from pathlib import Path

import pytest
from resumed_runs import GRPO, cut, given, go, same

from posttrain.build.fingerprint import fingerprints
from posttrain.config import recipe_from_dict, resolve
from posttrain.runs import read_rollouts

TWO_TURNS = {"env": {"name": "scripted", "replies": ["+1="]}}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_of_two_turns_goes_on_exactly(tmp_path: Path, max_lag: int) -> None:
    """Metrics, weights, and the stored rollouts with their masks; batches that wait among them."""
    values = [
        given(tmp_path / name, {**GRPO, "steps": 4, "max_lag": max_lag}, task=TWO_TURNS)
        for name in ("whole", "cut")
    ]
    whole, _ = go(values[0])
    cut(values[1], save=2)
    again, told = go(values[1], resume=True)
    assert "from step 2" in told or "step 2" in told
    same(whole.folder, again.folder)
    rows = read_rollouts(again.folder.stage("rl").rollouts)
    for row in rows:
        missing = [place for place, known in enumerate(row["sampler_logprobs"]) if known is None]
        assert len(missing) == 3  # "+1=", character by character
        assert missing == list(range(missing[0], missing[0] + 3))
        assert row["length"] == len(row["completion_tokens"]) - 3


def test_the_environment_is_part_of_what_a_run_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file is another run; the options stand in the resolved recipe."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "depended_env.py").write_text(
        "class Asks:\n    def __init__(self, *, times: int = 1): ...\n"
    )
    (tmp_path / "depended_check.py").write_text("def right(completion): return 1.0\n")
    own = {"env": "depended_env:Asks", "accuracy": "depended_check:right"}
    values = given(tmp_path / "run", {}, task=own)
    resolved = resolve(recipe_from_dict(values))
    assert resolved.task is not None
    assert resolved.task["env"] == {"name": "depended_env:Asks", "times": 1}
    assert {"task.env", "task.accuracy"} <= fingerprints(resolved)["contents"].keys()
    with pytest.raises(ValueError, match=r"task\.env 'depended_env:Asks': unknown option 'time'"):
        resolve(
            recipe_from_dict(
                given(tmp_path, {}, task={"env": {"name": "depended_env:Asks", "time": 1}})
            )
        )
    with pytest.raises(ValueError, match=r"task\.env: unknown name 'script'; did you mean"):
        resolve(recipe_from_dict(given(tmp_path, {}, task={"env": "script"})))
