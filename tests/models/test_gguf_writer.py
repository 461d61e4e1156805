"""Ordinary folder → GGUF: what is read back has the same logits and the same tokens."""

import json
from pathlib import Path

import pytest
import torch
from command_line import command_in
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from posttrain.models.load import load_policy
from posttrain.models.save import export_gguf, import_gguf

gguf = pytest.importorskip("gguf")
writer = pytest.importorskip("posttrain.models.files.gguf_writer")

MERGES = [("a", "b"), ("Ġ", "a"), ("e", "r"), ("t", "h"), ("th", "e"), ("1", "2")]
TEXTS = [
    "ab the er",
    "12 123\n\n  the  é日本🙂",
    "<|im_start|>user\nab<|im_end|>",
    "it's IT'S a\t b",
]
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "vocab_size": 288, "rms_norm_eps": 1e-5,
}  # fmt: skip


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(pieces)}, merges=MERGES))
    split = next(each for each, name in writer._SPLITS.items() if name == "qwen2")
    by_regex = pre_tokenizers.Split(Regex(split), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family == "llama")
    sequence = [bytes_of] if family == "llama" else [by_regex, bytes_of]
    backend.pre_tokenizer = pre_tokenizers.Sequence(sequence)
    backend.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        bos_token="<|endoftext|>", chat_template=CHAT,
    )  # fmt: skip


def write_folder(folder: Path, family: str, *, tied: bool = False, **more: object) -> None:
    more = {"head_dim": 32} | more if family == "qwen3" else more
    config = AutoConfig.for_model(family, **{**SIZES, **more}, tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # biases are 0 and norms 1: exchanged ones would not show
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_read_back_is_what_was_written(tmp_path: Path, family: str, tied: bool) -> None:
    """In float32 bit for bit, by our import and by transformers; tokens and template too."""
    write_folder(tmp_path / "model", family, tied=tied)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", kind="f32")
    import_gguf(tmp_path / "out.gguf", tmp_path / "back")
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "back")
    )
    tokens = torch.arange(0, 262, 7)[None]
    assert torch.equal(first(tokens).logits, second(tokens).logits)
    assert second.config.tie_word_embeddings == tied
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "back"))
    for text in TEXTS:
        assert one(text).input_ids == other(text).input_ids
        assert other.decode(other(text).input_ids) == text
    messages = [{"role": "user", "content": "ab"}]
    assert other.apply_chat_template(messages, tokenize=False) == "<|im_start|>ab<|im_end|>"
    assert load_policy(str(tmp_path / "out.gguf")).end_tokens[0] == one.eos_token_id


@pytest.mark.parametrize(("kind", "bound"), [("f16", 2**-11), ("q8_0", 1 / 254 + 2**-11)])
def test_smaller_types_are_within_their_rounding(
    kind: str,
    bound: float,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half a step: 2⁻¹¹ of a weight in float16, 1/254 of the largest of 32 in Q8_0,
    whose scale is a float16 itself.
    """
    write_folder(tmp_path / "model", "qwen2")
    posttrain = command_in(tmp_path, columns=100, monkeypatch=monkeypatch, capsys=capsys)
    result = posttrain("model", "export", "model", "o.gguf", "--type", kind)
    assert (result.code, "o.gguf: written, " in result.out) == (0, True), result
    before = load_policy(str(tmp_path / "model")).model.state_dict()
    after = load_policy(str(tmp_path / "o.gguf")).model.state_dict()
    for name, weight in before.items():
        if weight.ndim == 1:
            assert torch.equal(weight, after[name])
            continue
        blocks = weight.view(-1, 32).abs()
        largest = blocks.amax(-1, keepdim=True) if kind == "q8_0" else blocks
        off = (weight - after[name]).view(-1, 32).abs()
        assert bool((off <= 1.001 * bound * largest + 1e-7).all()), name
        assert not torch.equal(weight, after[name])


def test_rows_that_are_no_whole_blocks_stay_in_float16(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "qwen2", intermediate_size=80)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", kind="q8_0")
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert found["blk.0.ffn_down.weight"] == "F16"
    assert found["blk.0.ffn_up.weight"] == "Q8_0"
    assert found["blk.0.attn_q.bias"] == found["output_norm.weight"] == "F32"


def test_what_is_not_written_names_the_command_that_does(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "qwen2")
    command = r"convert_hf_to_gguf\.py .*model --outfile OUT\.gguf --outtype f16"
    write_folder(tmp_path / "mistral-model", "mistral")
    with pytest.raises(ValueError, match=rf"the architecture 'mistral'; .*{command}"):
        export_gguf(tmp_path / "mistral-model", tmp_path / "out.gguf")
    file = tmp_path / "model" / "config.json"
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    with pytest.raises(ValueError, match=rf"rotary positions of the type 'yarn'; .*{command}"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")
    with pytest.raises(ValueError, match=r"cannot write a tokenizer other than byte-level BPE"):
        export_gguf("tiny", tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="type: 'q4'; known: f32, f16, q8_0"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf", kind="q4")
    assert not list(tmp_path.glob("*out.gguf*"))
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(FileExistsError, match="is there already"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")
