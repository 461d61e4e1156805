"""A chat model whose tokens are bytes: a character may take several, as in the models of today."""

from __future__ import annotations

from pathlib import Path

import torch
from chat_families import end_tokens, family_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.data.template import Template

SAID = "naïve 日本 🎉! stop"
FAMILY = "qwen2.5"


def taught_model(folder: Path) -> Path:
    """A model folder with the chat template of Qwen 2.5 that answers :data:`SAID` to "Speak."."""
    tokenizer = family_tokenizer(FAMILY)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    )
    template = Template(tokenizer, chat=True, end_tokens=end_tokens(FAMILY, tokenizer))
    chat = [{"role": "user", "content": "Speak."}, {"role": "assistant", "content": SAID}]
    (row,) = template.render_conversation(chat)
    tokens, mask = (torch.tensor(each)[None] for each in row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(90):
        labels = tokens.masked_fill(~mask, -100)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
