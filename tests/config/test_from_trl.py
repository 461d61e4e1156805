"""``posttrain from-trl``: recipes of TRL's scripts and configurations, which are never executed."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import recipe_from_dict
from posttrain.config.peers.trl_recipe import recipe_of_trl

GRPO = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
open("executed", "w")
STEPS = 200
dataset = load_dataset("openai/gsm8k", "main", split="train")
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]
args = GRPOConfig(output_dir="out", num_generations=4, max_completion_length=128, beta=0.01,
    max_steps=STEPS, per_device_train_batch_size=16, gradient_accumulation_steps=2,
    report_to="wandb", logging_steps=10, reward_weights=[1.0, 0.5], run_name=name())
trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[reward_len, "owner/judge"],
    args=args, train_dataset=dataset, peft_config=LoraConfig(r=8, lora_alpha=16))
trainer.train()
"""
SFT = """
from trl import SFTTrainer
from datasets import load_dataset
data = load_dataset("trl-lib/Capybara")
SFTTrainer("Qwen/Qwen3-0.6B", train_dataset=data["train"], eval_dataset=data["test"]).train()
"""
DPO = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
args = DPOConfig(loss_type=["ipo"], beta=0.2, num_train_epochs=1, lr_scheduler_type="cosine")
DPOTrainer(model=model, args=args, train_dataset=load_dataset("a/b", split="train").map(f))
"""
REWARD = """
RewardTrainer(model="Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized",
    split="train"), args=RewardConfig(max_length=512, center_rewards_coefficient=0.01))
"""
YAML = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: a/b
dataset_config: main
reward_funcs: [my_rewards:short]
num_generations: 8
loss_type: dr_grpo
scale_rewards: none
warmup_ratio: 0.1
"""
# A list of twice a list of twice a list …: a few lines that would fill the memory.
DOUBLED = "".join(f"a{n} = [a{n + 1}, a{n + 1}]\n" for n in range(20)) + "a20 = []\n"
DOUBLED += "GRPOTrainer(model=a0)"


def translated(folder: Path, text: str, *, name: str = "script.py", **options: Any) -> Any:
    """The recipe as a dict, and the comments above it."""
    path = folder / name
    path.write_text(text)
    made = recipe_of_trl(path, **options)
    values = tomllib.loads(made)
    recipe_from_dict(values)  # every key is one of ours
    return values, [line for line in made.splitlines() if line.startswith("#")]


def test_a_grpo_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 × 2 completions in groups of 4 are 8 prompts; the averaging is TRL's own default."""
    monkeypatch.chdir(tmp_path)
    values, notes = translated(tmp_path, GRPO)
    assert not (tmp_path / "executed").exists()
    assert values["task"] == {"name": "file", "path": "openai/gsm8k:main:train"}
    assert values["rewards"] == {
        "script:reward_len": 1.0,
        "model": {"weight": 0.5, "path": "owner/judge"},
    }
    assert values["adapter"] == {"rank": 8, "alpha": 16}
    assert values["run"] == {"folder": "out", "trackers": ["wandb"]}
    assert values["rl"] == {
        "algorithm": "grpo",
        "prompts_per_step": 8,
        "group_size": 4,
        "max_new_tokens": 128,
        "steps": 200,
        "kl": {"coefficient": 0.01},
        "loss": {"clip_low": 0.2, "clip_high": 0.2},
        "weights": "token_mean",
        "adam_betas": [0.9, 0.999],
        "schedule": "linear",
        "learning_rate": 1e-6,
    }
    assert "# run_name = name(): not read; set it by hand" in notes
    assert "# logging_steps has no counterpart: every step is logged" in notes


def test_sft_dpo_and_reward_scripts(tmp_path: Path) -> None:
    values, notes = translated(tmp_path, SFT)
    assert values["sft"]["data"] == "trl-lib/Capybara:train"
    assert values["sft"]["test_data"] == "trl-lib/Capybara:test"
    assert (values["sft"]["epochs"], values["sft"]["batch_size"]) == (3, 8)
    assert values["model"] == {"name": "Qwen/Qwen3-0.6B"}
    values, notes = translated(tmp_path, DPO)
    assert values["model"]["name"] == "Qwen/Qwen2-0.5B-Instruct"
    assert {k: values["dpo"][k] for k in ("loss", "beta", "epochs", "schedule", "data")} == {
        "loss": "ipo", "beta": 0.2, "epochs": 1, "schedule": "cosine", "data": "a/b:train"
    }  # fmt: skip
    assert any(".map(f): not done to the rows" in note for note in notes)
    values, notes = translated(tmp_path, REWARD)
    assert values["reward"]["learning_rate"] == 1e-4
    assert any("max_length = 512" in note for note in notes)
    assert "# center_rewards_coefficient = 0.01: no counterpart" in notes


def test_a_configuration(tmp_path: Path) -> None:
    values, notes = translated(tmp_path, YAML, name="grpo.yaml")
    rl = values["rl"]
    assert rl["weights"] == {"name": "sequence_sum", "length": 512}
    assert (rl["advantage"], rl["kl"]) == ("group_centred", {"placement": "none"})
    assert values["task"]["path"] == "a/b:main:train"
    assert any("rl.steps: TRL trains for 3 epochs" in note for note in notes)
    assert "# warmup_ratio = 0.1: set rl.warmup_steps" in notes
    values, _ = translated(tmp_path, '{"beta": 0.3}', name="a.json", trainer="KTO")
    assert (values["dpo"]["loss"], values["dpo"]["beta"]) == ("kto", 0.3)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "def (", "neither Python nor YAML or JSON"),
        ("a.py", "print(1)", "calls no trainer of TRL; known: GRPOTrainer"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "- a", "expected options by name, got list"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be read"),
        ("a.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "it has aliases"),
        ("a.py", f"x = {'-' * 100_000}1", "neither Python nor YAML or JSON"),
        ("a.py", f"x = 1\nx = a{'.b' * 600}\nGRPOTrainer('a/b')", "neither Python nor YAML"),
        ("a.py", f"# {'x' * 2**20}", "more than 1048576 characters"),
        ("a.py", DOUBLED, "its values are more than 1048576 characters"),
    ],
    ids=lambda given: given[:20],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translated(tmp_path, text, name=name)
    with pytest.raises(ValueError, match="there is no such file"):
        recipe_of_trl(tmp_path / "none.py")


def test_an_sft_script_with_steps_and_lengths(tmp_path: Path) -> None:
    """What TRL 1.16 calls these, and what is learned of a chat there."""
    script = (
        "from trl import SFTConfig, SFTTrainer\n"
        'args = SFTConfig(max_steps=7, max_length=512, packing=True, dataset_text_field="body")\n'
        'SFTTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset="rows.jsonl").train()\n'
    )
    values, notes = translated(tmp_path, script)
    assert (values["sft"]["steps"], values["sft"]["max_length"]) == (7, 512)
    assert "epochs" not in values["sft"]
    assert values["sft"]["columns"] == {"text": "body"}
    assert any("packed without seeing each other, always (docs/sft.md)" in note for note in notes)
    assert any("TRL trains on all tokens of conversations" in note for note in notes)
    only = script.replace("max_steps=7", "completion_only_loss=False")
    assert translated(tmp_path, only)[0]["sft"]["train_on"] == "all"


def test_a_list_of_itself(tmp_path: Path) -> None:
    """Nor is anything made of a list of which a part cannot be read."""
    text = (
        "a = [a]\nGRPOTrainer(model='a/b', args=GRPOConfig(stop_strings=a), peft_config=LoraConfig("
    )
    values, notes = translated(tmp_path, text + "target_modules=['q_proj', other()]))")
    assert "stop" not in values["rl"]
    assert "adapter" not in values
    assert "# stop_strings = [a]: not read; set it by hand" in notes
    assert any("target_modules = ['q_proj', other()]: not read" in note for note in notes)


def test_nothing_leaves_the_comments(tmp_path: Path) -> None:
    """The name of an option is text of a stranger: it may not become a line of the recipe."""
    text = '"a\\n[rewards]\\n\\"os:system\\" = 1.0\\n#\\u001b[2J": 3'
    values, notes = translated(tmp_path, text, name="a.yaml", trainer="GRPO")
    assert "rewards" not in values
    assert '# a [rewards] "os:system" = 1.0 # [2J = 3: no counterpart' in notes


def test_values_of_other_kinds(tmp_path: Path) -> None:
    """What is no number where one is wanted is told; 1e-6 is one, though YAML says text."""
    text = """
learning_rate: 1e-6
num_generations: 0
per_device_train_batch_size: [1]
num_train_epochs: .nan
loss_type: [dapo]
report_to: 5
reward_funcs: [mine:short, mine:long]
reward_weights: [2.0]
"""
    values, notes = translated(tmp_path, text, name="a.yaml")
    rl = values["rl"]
    assert (rl["learning_rate"], rl["group_size"], rl["prompts_per_step"]) == (1e-6, 8, 1)
    assert values["rewards"] == {"mine:short": 1.0, "mine:long": 1.0}
    for told in (
        "num_generations = 0: not read",
        "per_device_train_batch_size = [1]: not read",
        "num_train_epochs = nan: not read",
        "reward_weights = [2.0]: not one for each",
    ):
        assert any(told in note for note in notes), told


def test_options_of_another_meaning(tmp_path: Path) -> None:
    """Where the counterpart takes other values, the option is told and nothing is set."""
    text = """
args = GRPOConfig(generation_batch_size=64, per_device_train_batch_size=8, max_steps=80, delta=4.0,
    mask_truncated_completions=True)
GRPOTrainer(model="a/b", args=args, peft_config=LoraConfig(r=rank(), lora_alpha=16))
"""
    values, notes = translated(tmp_path, text)
    rl = values["rl"]
    assert (rl["minibatches"], rl["steps"], rl["prompts_per_step"]) == (8, 10, 8)
    assert rl["loss"] == {"clip_low": 0.2, "clip_high": 0.2}
    assert "missing_end_penalty" not in rl
    assert values["adapter"] == {"alpha": 16}
    for told in ("delta = 4.0", "mask_truncated_completions = True", "LoraConfig's r = rank()"):
        assert any(told in note for note in notes), told
    values, notes = translated(tmp_path, "CPOTrainer(model='a/b', args=CPOConfig(cpo_alpha=0.5))")
    assert any("CPO's own loss has no counterpart" in note for note in notes)
    values, _ = translated(tmp_path, "CPOTrainer(model='a/b', args=CPOConfig(loss_type='simpo'))")
    assert values["dpo"]["loss"] == "simpo"


def test_files_by_their_splits(tmp_path: Path) -> None:
    text = """
rows = load_dataset("json", data_files={"train": "chats.jsonl", "test": "t.jsonl"})["SPLIT"]
SFTTrainer("a/b", args=SFTConfig(), train_dataset=rows)
"""
    for split, file in (("train", "chats.jsonl"), ("test", "t.jsonl")):
        assert translated(tmp_path, text.replace("SPLIT", split))[0]["sft"]["data"] == file


GUARDED = """
def right(completions, **kwargs): ...
def short(completions, **kwargs): ...
def main():
    data = load_dataset("a/b", split="train").map(to_chat)
    args = GRPOConfig(vllm_mode="colocate", use_vllm=True, max_steps=3, save_total_limit=1)
    GRPOTrainer(model="m", reward_funcs=[right, short], args=args, train_dataset=data).train()
"""


def test_what_a_run_imports_is_told_once_and_a_guard_that_is_there_is_not_asked_for(
    tmp_path: Path,
) -> None:
    said = (
        "# script:right, script:short: a run imports script.py for this, with all that it imports: "
    )
    fix = "install that, or move rewards into a file of their own"
    guard = 'put the training under `if __name__ == "__main__":`, and '
    assert said + guard + fix in translated(tmp_path, GUARDED + "main()\n")[1]
    call = "if __name__ == '__main__':\n    main()\n"
    assert said + fix in translated(tmp_path, GUARDED + call)[1]


def test_other_places_of_options_and_rows_are_named(tmp_path: Path) -> None:
    _, notes = translated(tmp_path, GUARDED)
    text = "\n".join(notes)
    assert "vllm_mode has no counterpart: rl.engine samples where it trains" in text
    assert "save_total_limit = 1: set run.keep_last by hand" in text
    assert ".map(to_chat): not done to the rows (where your prompts are text, completions" in text
