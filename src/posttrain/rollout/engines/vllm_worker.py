"""What runs inside vLLM's own process: it takes weights from a folder, and says what it has.

The server is started with ``--worker-extension-cls vllm_worker.PolicyWeights`` and a copy of this
file on its path, in an environment of its own: nothing of ours can be imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops
from safetensors import safe_open

# A CPU build packs the matrices when the model loads, and weights that come later never reach what
# it packed: with tied embeddings without an error. This module is imported before the model loads.
vllm._custom_ops._supports_onednn = False

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class PolicyWeights:
    """Methods that vLLM's worker gets, for ``/collective_rpc``."""

    model_config: Any
    model_runner: Any
    posttrain_folder: str

    def posttrain_model(self) -> dict[str, Any]:
        """The model's shape, how it computes, and the folder that its weights are from."""
        config = self.model_config.hf_text_config
        return {
            "shape": {name: getattr(config, name, None) for name in SHAPE},
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "longest": self.model_config.max_model_len,
            "logprobs": self.model_config.logprobs_mode,
            "weights": getattr(self, "posttrain_folder", self.model_config.model),
        }

    def posttrain_load(self, folder: str) -> None:
        """Take the weights of a model folder; of an adapter's the server has them already."""
        self.posttrain_folder = ""  # of none, should this fail half way
        if not (Path(folder) / "adapter_config.json").exists():
            with torch.no_grad():
                self.model_runner.model.load_weights(_weights(Path(folder)))
        self.posttrain_folder = folder


def _weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights in {folder}, as this process sees it")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)
