"""Runs with adapters: their folders, their resume, and what reads them afterwards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import GRPO, cut, given, go, same
from small_runs import TINY, recipe, small_run, weights

from posttrain.build import setup
from posttrain.build.model_source import merge_adapter
from posttrain.config import ConfigError, cautions, recipe_from_dict, resolve
from posttrain.models.load import load_policy
from posttrain.models.reward import load_reward
from posttrain.models.save import save_policy

ADAPTER = {"rank": 4, "alpha": 16.0}
PPO = {
    "steps": 6,
    "save_every": 2,
    "algorithm": "ppo",
    "critic": {"warmup_steps": 1},
    "kl": {"rule": "proportional", "target": 0.05, "horizon": 20, "refresh_every": 3},
}


@pytest.mark.parametrize(
    "rl",
    [
        pytest.param(PPO, id="ppo"),
        pytest.param(GRPO, id="grpo", marks=pytest.mark.slow),
        pytest.param({**GRPO, "max_lag": 2}, id="ahead", marks=pytest.mark.slow),
    ],
)
def test_a_cut_run_of_adapters_goes_on_bit_for_bit(rl: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = go(given(tmp_path / "whole", rl, adapter=ADAPTER))
    values = given(tmp_path / "cut", rl, adapter=ADAPTER)
    cut(values, save=3)
    done, text = go(values, resume=True)
    assert "rl: goes on from step 4" in text
    same(done.folder, whole.folder)
    moved = weights(done.folder.stage("rl").model)
    begun = weights(done.folder.stage("sft").model)
    assert not any(torch.equal(moved[name], begun[name]) for name in moved)


def test_a_run_leaves_adapters_and_one_base(tmp_path: Path) -> None:
    """Another place, a checkpoint, a merged folder: the same probabilities."""
    done, _ = small_run(recipe(tmp_path / "run", adapter=ADAPTER, rl={"save_every": 3}))
    folder = done.folder.path
    bases = list(folder.glob("base-*"))
    assert len(bases) == 1
    held = {path.parent.parent.name for path in folder.rglob("adapter_config.json")}
    assert held == {"sft", "rl", "step-000003"}
    assert [path.parent for path in folder.rglob("model.safetensors")] == bases
    said = json.loads((folder / "rl/model/adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"]) == (str(bases[0]), 4)

    tokens = torch.arange(5, 25)[None]
    expected = load_policy(str(folder / "rl/model")).model(tokens).logits
    merge_adapter(str(folder), tmp_path / "merged")
    shutil.move(folder, tmp_path / "moved")
    places = ("moved/rl/model", "moved/rl/checkpoints/step-000003/model")
    for place in places:
        assert torch.equal(load_policy(str(tmp_path / place)).model(tokens).logits, expected)
    merged = load_policy(str(tmp_path / "merged")).model(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_trained_on_by_a_later_run_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    first, _ = small_run(recipe(tmp_path / "first", adapter=ADAPTER, rl=None, eval=None))
    source = str(first.folder.stage("sft").model)
    later = recipe(tmp_path / "later", adapter=ADAPTER, sft=None, eval=None)
    later["model"] = {"name": source}
    done, _ = small_run(later)
    said = json.loads((done.folder.stage("rl").model / "adapter_config.json").read_text())
    assert Path(said["base_model_name_or_path"]).parent == tmp_path / "first"
    later["adapter"] = {"rank": 8}
    later["run"]["folder"] = str(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"adapter.rank: 8, but .* of rank 4, alpha 16, rslora false and"
    ):
        small_run(later)


# ------------------------------------------------------------------------------ configuration


def resolved(**sections: Any) -> Any:
    return resolve(recipe_from_dict(recipe(Path("run"), **sections)))


def test_targets_that_no_layer_has_are_told_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(load_policy("tiny", options=TINY), tmp_path / "base")
    monkeypatch.setattr(setup, "load_policy", lambda *_, **__: pytest.fail("they are read"))
    values = recipe(tmp_path / "run", adapter={"rank": 2, "targets": ["q_proj", "q_pro"]})
    values["model"] = {"name": str(tmp_path / "base")}
    with pytest.raises(ValueError, match=r"adapter\.targets: .*'q_pro'; it has down_proj, gate_"):
        small_run(values)


def test_an_adapter_learns_at_ten_times_the_default_rate() -> None:
    values = {"task": {"name": "arithmetic"}, "sft": {}, "rl": {"algorithm": "ppo"}}
    plain = resolve(recipe_from_dict(values))
    lora = resolve(recipe_from_dict({**values, "adapter": {"rank": 8}}))
    assert (plain.sft.learning_rate, lora.sft.learning_rate) == (2e-5, 2e-4)
    assert (plain.rl.learning_rate, lora.rl.learning_rate) == (1e-6, 1e-5)
    assert lora.rl.critic is not None
    assert lora.rl.critic.learning_rate == 1e-4
    assert resolved(adapter={"rank": 8}, rl={"learning_rate": 5e-4}).rl.learning_rate == 5e-4


def test_the_rate_of_the_other_kind_is_said() -> None:
    low = resolved(adapter={"rank": 8}, rl={"learning_rate": 1e-6})
    assert "rl.learning_rate: 1e-06 is a rate for all weights" in " ".join(cautions(low))
    values = recipe(Path("run"), sft=None, rl={"learning_rate": 1e-4})
    values["model"] = {"name": "some/model"}
    high = " ".join(cautions(resolve(recipe_from_dict(values))))
    assert "rl.learning_rate: 0.0001 is a rate for adapters" in high
    values["adapter"] = {"rank": 8}
    assert not cautions(resolve(recipe_from_dict(values)))


def test_an_adapter_beside_random_weights_is_said() -> None:
    said = [told for told in cautions(resolved(adapter={"rank": 8})) if "random" in told]
    assert said
    assert said[0].startswith("adapter.rank: the weights of")


def test_vllm_is_refused_beside_a_base_in_four_bits() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.quantize: vLLM would sample beside weights"):
        resolved(adapter={"rank": 8, "quantize": "nf4"}, rl={"engine": "vllm"})
    assert resolved(adapter={"rank": 8}, rl={"engine": "vllm"}).adapter.rank == 8


def test_keys_without_a_rank_have_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.alpha: no effect without adapters"):
        resolved(adapter={"alpha": 8.0})
    with pytest.raises(ConfigError, match=r"adapter\.quantize: no effect without adapters"):
        resolved(adapter={"quantize": "nf4"})
    with pytest.raises(ConfigError, match=r"TRL's lora_alpha is adapter.alpha here"):
        resolved(adapter={"rank": 8, "lora_alpha": 8.0})
    kl = {"placement": "loss", "coefficient": 0.1, "offload": True}
    with pytest.raises(ConfigError, match=r"rl\.kl\.offload: the reference of adapters is the"):
        resolved(adapter={"rank": 8}, rl={"kl": kl})


@pytest.mark.slow
def test_a_reward_model_is_an_adapter_too_and_a_critic_begins_with_it(tmp_path: Path) -> None:
    """Its scores come back from the folder, beside the policy's adapters on the same base."""
    values = recipe(
        tmp_path / "run",
        adapter=ADAPTER,
        prefer={"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
        reward={"batch_size": 4, "learning_rate": 1e-3, "save_every": 1},
        rl={"algorithm": "ppo", "critic": {"source": "reward"}},
        rewards={"model": 1.0},
        eval=None,
    )
    done, _ = small_run(values)
    folder = done.folder.stage("reward").model
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert not list(done.folder.path.rglob("reward/**/model.safetensors"))
    whole, begun = weights(folder), weights(done.folder.stage("sft").model)
    assert not torch.equal(
        *(
            given["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
            for given in (whole, begun)
        )
    )
    reward = load_reward(str(folder))
    assert reward.deviation != 1.0
    trained = {name for name, w in reward.model.named_parameters() if w.requires_grad}
    assert len(trained) == len(whole)
    assert "score.weight" in trained
