"""The table of docs/models.md: which way each family samples and learns, with trained-like weights.

``PYTHONPATH=tests python tests/models/ways_page.py`` prints it.
"""

import warnings
from types import SimpleNamespace

import torch
import transformers
from models.families import FAMILIES, UNUSUAL, VOCABULARY, trained_like

from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.quiet import without_reports
from posttrain.protocols import Engine
from posttrain.rollout.engines import ENGINES
from posttrain.types.ways import Way

HEAD = ["| family | samples | learns | falls back, because |", "|---|---|---|---|"]
LONGEST = 24  # tokens of a sequence
_SIZES = FAMILIES["gpt_neox"][1]
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "initializer_range": 0.5}
_NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_OLD = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}

# name: (config class, its sizes), beside those that other tests have; windows as long as usual
MORE = {
    "cohere2": ("Cohere2Config", _GROUPED),
    "exaone4": ("Exaone4Config", {**_GROUPED, "sliding_window": 4096}),
    "falcon": ("FalconConfig", _SIZES),
    "gemma2": ("Gemma2Config", {**FAMILIES["gemma2"][1], "sliding_window": 4096}),
    "gemma3": ("Gemma3TextConfig", {**FAMILIES["gemma3"][1], "sliding_window": 512}),
    "glm4": ("Glm4Config", {**_GROUPED, "head_dim": 8}),
    "gpt_oss": ("GptOssConfig", {**_GROUPED, "head_dim": 8, "num_local_experts": 4}),
    "gptj": ("GPTJConfig", {**_OLD, "rotary_dim": 4}),
    "lfm2": ("Lfm2Config", {**_GROUPED, "layer_types": ["conv", "full_attention"]}),
    "mistral": ("MistralConfig", {**FAMILIES["mistral"][1], "sliding_window": 4096}),
    "mistral, window 16": ("MistralConfig", {**FAMILIES["mistral"][1], "sliding_window": 16}),
    "mpt": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "phi": ("PhiConfig", _SIZES),
    "phi3": ("Phi3Config", _GROUPED),
    "smollm3": ("SmolLM3Config", _GROUPED),
    "stablelm": ("StableLmConfig", _GROUPED),
    "starcoder2": ("Starcoder2Config", _GROUPED),
}
TABLE = dict(sorted({**FAMILIES, **UNUSUAL, **MORE}.items()))


def parts(family: str) -> tuple[Engine, LocalLearner]:
    """The native engine and the learner of a model of the family that is like a trained one."""
    kind, sizes = TABLE[family]
    with warnings.catch_warnings(), without_reports():
        warnings.simplefilter("ignore")  # they say in other words what the table says
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, kind)(**{**sizes, **_NO_IDS})
        )
        trained_like(model)
        policy = SimpleNamespace(model=model, end_tokens=(3,))
        engine = ENGINES["native"](policy, str)
        learner = LocalLearner(model, adamw(model, learning_rate=1e-9), save=lambda folder: None)
        engine.way(), learner.way(LONGEST)  # what is asked once of a model warns once
    return engine, learner


def row(family: str, samples: Way, learns: Way) -> str:
    """A row of the table."""
    missing = {missing.why: None for way in (samples, learns) for missing in way.without}
    shown = (", ".join(way.uses) for way in (samples, learns))
    return f"| {family} | {' | '.join(shown)} | {'; '.join(missing)} |"


def page_rows() -> list[str]:
    """The table in Markdown."""
    lines = [*HEAD]
    for family in TABLE:
        engine, learner = parts(family)
        lines.append(row(family, engine.way(), learner.way(LONGEST)))
    return lines


if __name__ == "__main__":
    print("\n".join(page_rows()))
