"""Passes played from a recording: the numbers of the ordinary ones, for one batch after another."""

import pytest
import torch
from models.test_frames import rows
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.models.compiled import compile_layers
from posttrain.models.logprobs import score_tokens
from posttrain.models.recorded_pass import Recordings, pausing, playing
from posttrain.types import Batch

pytestmark = pytest.mark.gpu


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).cuda().eval()


def outcome(policy: LlamaForCausalLM, batches: list[Batch]) -> tuple[list[Tensor], Tensor]:
    """Log-probs of micro-batches, and the gradient that they add up to."""
    policy.zero_grad()
    found = []
    for given in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logprobs = score_tokens(policy, given.to("cuda")).logprobs
        logprobs.sum().backward()
        found.append(logprobs.detach().cpu())
    slopes = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
    return found, torch.cat(slopes).cpu()


@pytest.mark.parametrize(
    ("compiled", "paused"), [(False, False), (True, False), (False, True)], ids=str
)
def test_recorded_passes(compiled: bool, paused: bool) -> None:
    """Three batches of one frame and one of another, twice, with other weights in between."""
    policy = model()
    batches = [
        rows(prompts=4, siblings=8, asked=asked, answered=answered)
        for asked, answered in ((40, 104), (36, 103), (50, 102), (20, 300))
    ]
    recordings = Recordings(policy.get_decoder(), torch.bfloat16)
    if compiled:
        compile_layers(policy)
    for _ in range(2):
        expected, slope = outcome(policy, batches)
        recordings.refresh()
        with playing(recordings), pausing(*[recordings][:paused]):
            found, other = outcome(policy, batches)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02)
        assert float((other - slope).norm() / slope.norm()) < 0.02
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.01)
    assert len(recordings._known) == (0 if paused else 2)
