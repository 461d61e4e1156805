"""What users do with preferences and reward models that is not in the book."""

from pathlib import Path

import pytest
import torch
from small_runs import TINY
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import posttrain
from posttrain.build.fingerprint import fingerprints
from posttrain.config import recipe_from_dict
from posttrain.data.template import Template
from posttrain.models.reward import score_sequences
from posttrain.models.reward_scorer import pad_rows
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt, Rollout, Score, Turn

MODEL = {"options": TINY}


def broken(completion: str) -> float:
    """Breaks on every second length."""
    if len(completion) % 2:
        raise ValueError("odd")
    return 1.0


def test_prompts_without_rewards_of_their_own(tmp_path: Path) -> None:
    """The annotator's rewards are all that prefer needs."""
    run = posttrain.prefer(
        model="tiny",
        prompts=[f"{n}:" for n in range(12)],
        reward={"length": {"weight": 1.0, "target": 0, "per_token": 0.1}},
        max_new_tokens=6,
        folder=tmp_path / "run",
        model_options=MODEL,
    )
    assert (run.folder.path / "prefer" / "pairs.jsonl").stat().st_size > 0
    assert run.folder.stage_record("prefer")["train"]["sets"] > 0


def letters(completion: str) -> float:
    return float(len(completion))


def test_runs_follow_one_another(tmp_path: Path) -> None:
    """A run stands for the policy that it trained, or for the preferences that it made."""
    rows = [{"prompt": f"{n}:", "completion": "1"} for n in range(12)]
    asked = [row["prompt"] for row in rows]
    once = {"steps": 1, "model_options": {"chat": False}}
    warm = posttrain.sft(data=rows, steps=1, model_options=MODEL, folder=tmp_path / "sft")
    pairs = posttrain.prefer(
        model=warm,
        prompts=asked,
        test_prompts=["x:", "y:"],
        reward=letters,
        samples=4,
        max_new_tokens=6,
        folder=tmp_path / "prefer",
    )
    made = pairs.folder.path / "prefer"
    tuned = posttrain.dpo(model=warm, data=pairs, folder=tmp_path / "dpo", **once)
    section = tuned.folder.config["dpo"]
    assert tuned.folder.config["model"]["name"] == str(warm.model)
    assert section["data"] == str(made / "pairs.jsonl")
    assert section["test_data"] == str(made / "test_pairs.jsonl")
    judge = posttrain.reward(
        model=tuned.folder.path, data=pairs, test_share=0.2, folder=tmp_path / "reward", **once
    )
    assert judge.folder.config["model"]["name"] == str(tuned.model)
    assert "test_data" not in judge.folder.config["reward"]
    with pytest.raises(ValueError, match="no stage of this run has finished a policy"):
        posttrain.rl(model=judge, prompts=asked, reward=letters, folder=tmp_path / "rl")
    learned = posttrain.rl(
        model=tuned,
        prompts=asked,
        reward=letters,
        adapter=True,
        kl=None,
        max_new_tokens=2,
        group_size=2,
        prompts_per_step=1,
        folder=tmp_path / "rl",
        **once,
    )
    assert learned.folder.config["rl"]["kl"]["placement"] == "none"
    assert learned.folder.config["adapter"]["rank"] == 16
    assert posttrain.evaluate(learned, prompts=["z:"], reward=letters).mean_reward >= 0


def test_a_broken_annotator_is_no_tie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    given = {"model": "tiny", "prompts": [f"{n}:" for n in range(12)], "model_options": MODEL}
    reward = {f"{Path(__file__).stem}:broken": 1.0}
    with pytest.raises(RuntimeError, match=r"scores are broken.*raised ValueError: odd"):
        posttrain.prefer(**given, reward=reward, max_new_tokens=6, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="needs the column 'answer'"):
        posttrain.prefer(
            **given, reward={"exact": 1.0}, max_new_tokens=6, folder=tmp_path / "other"
        )


def test_a_scorer_that_fails_breaks_its_scores_and_not_the_run() -> None:
    class Down:
        name = "down"

        def score(self, rollouts: list[Rollout]) -> list[Score]:
            raise ConnectionError("server down")

    class Short:
        name = "short"

        def score(self, rollouts: list[Rollout]) -> list[Score]:
            return []

    completion = Turn(tokens=(), logprobs=(), text="x", stop_reason="stop", version=0)
    rollout = Rollout(prompt=Prompt(id="p", text="?"), turns=(completion,), group=0)
    for scorer, reason in ((Down(), "server down"), (Short(), "gave 0 scores for 2 rollouts")):
        scores = RewardScorer({scorer: 1.0}).score([rollout, rollout])
        assert [score.state for score in scores] == ["invalid"] * 2
        assert reason in scores[0].reason


def test_a_model_beside_functions_has_to_be_somewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rewards\.model\.path.*name the folder of a"):
        posttrain.rl(prompts=["a"], reward={"model": 1.0, broken: 1.0}, folder=tmp_path / "r")


@pytest.mark.parametrize("end", [None, "[SEP]"])
def test_an_encoder_reads_the_pair_it_was_made_for(tmp_path: Path, end: str | None) -> None:
    """As transformers' own call with two texts, segments included, alone and padded."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdefgh:"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"), eos_token=end)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    template = Template(tokenizer)
    texts = [("a b c", "d e f g"), ("a", "h")]
    rows = [template.encode_exchange(Prompt(id="p", text=a), b) for a, b in texts]
    with torch.no_grad():
        found = score_sequences(model, pad_rows(rows, tokenizer.pad_token_id))
        for (first, second), score in zip(texts, found, strict=True):
            expected = model(**tokenizer(first, second, return_tensors="pt")).logits[0, 0]
            assert float(score) == pytest.approx(float(expected), abs=1e-5)


def test_another_model_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    recipe = recipe_from_dict({"model": {"name": str(tmp_path)}, "eval": {}})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "b.safetensors").write_bytes(b"2")
    first = fingerprints(recipe)
    (tmp_path / "b.safetensors").write_bytes(b"3")
    second = fingerprints(recipe)
    (tmp_path / "config.json").write_text('{"posttrain": {"score_mean": 99}}')
    assert len({str(found) for found in (first, second, fingerprints(recipe))}) == 3
