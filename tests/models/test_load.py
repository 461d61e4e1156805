"""load_policy: what it loads, what it refuses, and that every refusal names the fix."""

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import build
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from posttrain.fast.score import score_tokens
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy
from posttrain.models.tiny import build_tiny
from posttrain.types import Batch

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    save_policy(load_policy("tiny", options=SMALL), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "small"))


def edit(file: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    kept = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(kept))


def test_a_folder_loads_with_its_end_and_pad_tokens(folder: Path) -> None:
    policy = load_policy(str(folder))
    assert isinstance(policy, Policy)
    assert policy.source == str(folder)
    assert policy.end_tokens == (policy.tokenizer.eos_token_id,)
    assert policy.pad_token == policy.tokenizer.pad_token_id != policy.end_tokens[0]
    assert not policy.model.training
    assert all(weight.dtype == torch.float32 for weight in policy.model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtype_is_that_of_every_weight(folder: Path, dtype: str) -> None:
    for source in (str(folder), "tiny"):
        policy = load_policy(source, dtype=dtype)
        assert {weight.dtype for weight in policy.model.parameters()} == {getattr(torch, dtype)}


def test_end_tokens_are_the_tokenizers_first_then_the_generation_configs(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 1, 4])
    assert load_policy(str(folder)).end_tokens == (1, 5, 4)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert load_policy(str(folder)).end_tokens == (5, 1, 4)


def test_without_a_pad_token_an_end_token_pads(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    policy = load_policy(str(folder))
    assert policy.pad_token == policy.end_tokens[0] == policy.tokenizer.pad_token_id


def test_a_model_that_cannot_end_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    with pytest.raises(ValueError, match=r"no end token.*set eos_token"):
        load_policy(str(folder))


def test_dropout_is_off_even_in_training_mode(tmp_path: Path) -> None:
    folder, (_, tokenizer) = tmp_path / "gpt2", build_tiny()
    model = build("gpt2", dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokens = torch.tensor([[1, 2, 3, 4]])
    careless = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(careless(tokens).logits, careless(tokens).logits)
    policy = load_policy(str(folder))
    policy.model.train()
    assert torch.equal(policy.model(tokens).logits, policy.model(tokens).logits)


def test_the_pad_token_keeps_its_gradient(folder: Path) -> None:
    """An embedding with a padding index would drop it, and pad is often the end token."""
    policy = load_policy(str(folder))
    pad = policy.model.config.pad_token_id
    tokens = torch.tensor([[7, pad, 8]])
    batch = Batch(tokens=tokens, mask=torch.tensor([[False, False, True]]))
    score_tokens(policy.model, batch).logprobs.sum().backward()
    assert policy.model.get_input_embeddings().weight.grad[pad].abs().sum() > 0


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"can run any code.*save_pretrained"):
        load_policy(str(folder))


def test_damaged_weights_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged \(.*copy it again"):
        load_policy(str(folder))


def test_the_folder_of_a_run_names_its_models(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.json", "config.json"):
        (run / name).write_text("{}")
    with pytest.raises(ValueError, match="is the folder of a run, without a model"):
        load_policy(str(run))
    shutil.copytree(folder, run / "rl" / "model")
    with pytest.raises(ValueError, match=r"give the model in it: .*run/rl/model"):
        load_policy(str(run))


def test_code_of_a_models_own_is_never_run(folder: Path) -> None:
    (folder / "code.py").write_text("raise SystemExit('executed')")
    edit(folder / "config.json", model_type="unheard", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(ValueError, match="own code is never run"):
        load_policy(str(folder))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model, tokenizer = build_tiny(**SMALL)
    LlamaForSequenceClassification(model.config).save_pretrained(tmp_path / "score")
    tokenizer.save_pretrained(tmp_path / "score")
    with pytest.raises(ValueError, match=r"lacks 1 weights of a LlamaForCausalLM \(lm_head"):
        load_policy(str(tmp_path / "score"))


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    policy = load_policy(str(folder))
    policy.tokenizer.add_tokens(["<more>"])
    policy.tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="use the tokenizer that belongs to the model"):
        load_policy(str(folder))


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (["config.json"], "no config.json"),
        (["tokenizer.json", "tokenizer_config.json"], "holds no tokenizer; copy tokenizer.json"),
    ],
)
def test_an_incomplete_folder_says_what_it_lacks(
    folder: Path, remove: list[str], message: str
) -> None:
    for name in remove:
        (folder / name).unlink()
    with pytest.raises(ValueError, match=message):
        load_policy(str(folder))


def test_a_folder_of_models_names_them(folder: Path) -> None:
    with pytest.raises(ValueError, match="the models in it: small"):
        load_policy(str(folder.parent))


def test_an_adapter_is_named_as_one(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json' says peft_type None"):
        load_policy(str(folder))


def test_a_mistyped_path_gets_a_suggestion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean 'small'"):
        load_policy(str(folder.parent / "smal"))
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(ValueError, match="did you mean 'small'"):
        load_policy(f"{folder.parent.name}/smoll")  # it looks like a hub name, but is beside
    for number in range(30):
        (folder.parent / f"other-{number}").mkdir()
    for given in (str(folder.parent / "smal"), f"{folder.parent.name}/smoll"):
        with pytest.raises(ValueError, match=r"Known: small, .* and \d\d more") as caught:
            load_policy(given)
        assert str(caught.value).count("other-") <= 10
    with pytest.raises(ValueError, match="no folder 'nowhere/at'"):
        load_policy("nowhere/at/all")
    with pytest.raises(ValueError, match=r"there is no 'model\.gguf'"):
        load_policy("model.gguf")


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"hf download nobody/nothing --local-dir FOLDER"):
        load_policy("nobody/nothing")
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        load_policy("tini")


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="give the folder"):
        load_policy(str(folder / "model.safetensors"))


def test_unknown_names_get_a_suggestion(folder: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"):
        load_policy("tiny", dtype="bfloat")
    with pytest.raises(ValueError, match="did you mean 'attention'"):
        load_policy(str(folder), options={"attn": "eager"})
    with pytest.raises(ValueError, match="did you mean 'revision'"):
        load_policy("nobody/nothing", options={"revison": "main"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        load_policy("tiny", device="cuda")


def test_attention_can_be_chosen(folder: Path) -> None:
    policy = load_policy(str(folder), options={"attention": "eager"})
    assert policy.model.config._attn_implementation == "eager"


def test_models_load_one_after_the_other_whoever_asks(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that overlapped left ``tie_weights`` replaced: tied heads were random memory."""
    whole, inside, most = AutoModelForCausalLM.from_pretrained, Counter[str](), Counter[str]()

    def counted(*given: Any, **options: Any) -> Any:
        inside["now"] += 1
        most["ever"] = max(most["ever"], inside["now"])
        try:
            return whole(*given, **options)
        finally:
            inside["now"] -= 1

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    before = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load_policy, [str(saved)] * 12))
    assert most["ever"] == 1
    assert PreTrainedModel.tie_weights is before
