"""The ways of a small model on a GPU: what is declared at the start still holds after a step."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.fast.compiled import compile_layers
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.roofline import Shape, decode_step, measured_peak
from posttrain.rollout.engines import ENGINES
from posttrain.types import Batch, Prompt, Sampling

pytestmark = pytest.mark.gpu


def test_the_fast_way_is_declared_and_kept() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=500, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config).cuda()
    policy = SimpleNamespace(model=model, end_tokens=(3,))
    engine = ENGINES["native"](policy, str, compiled=True)
    compile_layers(model)
    learner = LocalLearner(
        model,
        adamw(model, learning_rate=1e-6),
        save=lambda folder: None,
        compute=torch.bfloat16,
        captured=True,
    )
    samples = engine.way()
    assert samples.uses == (
        "continuous batching",
        "CUDA graphs",
        "Triton kernels",
        "compiled layers",
    )
    learns = learner.way(64)
    assert learns.uses == ("packed sequences", "shared prompts", "captured passes")
    prompts = [Prompt(id="0", text="", tokens=(5, 6, 7))]
    engine.generate(prompts, Sampling(max_new_tokens=40), num_samples=8, seed=0)
    mask = torch.ones(4, 20, dtype=torch.bool)
    mask[:, :3] = False
    learner.infer(Batch(tokens=torch.arange(80).view(4, 20), mask=mask))
    assert (engine.way(), learner.way(64)) == (samples, learns)


def test_the_peaks_of_the_device_are_measured() -> None:
    peak = measured_peak("cuda", torch.bfloat16)
    assert peak.bytes_per_second > 0
    assert peak.flops_per_second > peak.bytes_per_second  # a matrix product reuses what it reads
    shape = Shape(
        weights=10**8, layers=2, heads=4, key_heads=2, head_size=8, vocabulary=5, width=32
    )
    assert decode_step(shape, rows=8, length=9, item_bytes=2).seconds(peak) > 0
