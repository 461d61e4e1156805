"""Passes replayed from a capture: the numbers of the ordinary ones, for one batch after another."""

import threading
from contextlib import nullcontext

import pytest
import torch
from fast.test_buckets import rows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.algorithms.weights import token_mean
from posttrain.fast.captured_pass import CapturedPasses, pausing, replaying
from posttrain.fast.compiled import compile_layers
from posttrain.fast.graphs import CaptureError, Pool, capturing
from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.models.gpu_memory import empty_cache
from posttrain.pipelines.likelihood import likelihood
from posttrain.types import Batch

pytestmark = pytest.mark.gpu

SHAPES = (32, 32768), (32768, 64)  # few results of long sums


def model(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
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
    gradients = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
    return found, torch.cat(gradients).cpu()


@pytest.mark.parametrize(
    ("compiled", "paused"), [(False, False), (True, False), (False, True)], ids=str
)
def test_captured_passes(compiled: bool, paused: bool) -> None:
    """Three batches of one frame and one of another, twice, with other weights in between."""
    policy = model()
    batches = [
        rows(prompts=4, siblings=8, asked=asked, answered=answered)
        for asked, answered in ((40, 104), (36, 103), (50, 102), (20, 300))
    ]
    captured = CapturedPasses(policy.get_decoder(), torch.bfloat16)
    if compiled:
        compile_layers(policy)
    for _ in range(2):
        expected, gradient = outcome(policy, batches)
        captured.refresh()
        with replaying(captured), pausing(captured) if paused else nullcontext():
            found, other = outcome(policy, batches)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02)
        assert float((other - gradient).norm() / gradient.norm()) < 0.02
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.3)
    assert len(captured._known) == (0 if paused else 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_learner_takes_the_same_steps(tied: bool) -> None:
    """Three steps on two batches in parts; each sees the weights that the last one left."""

    def learned(*, captured: bool) -> Tensor:
        policy = model(tied=tied)
        before = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
        learner = LocalLearner(
            policy,
            torch.optim.SGD(policy.parameters(), lr=3.0),
            save=lambda folder: None,
            max_gradient_norm=1.0,
            micro_batch_tokens=2048,
            compute=torch.bfloat16,
            captured=captured,
        )
        for answered in (104, 90, 104):
            given = rows(prompts=4, siblings=8, asked=40, answered=answered)
            learner.step(token_mean(given), likelihood)
        after = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
        return after - before

    expected, found = (learned(captured=captured) for captured in (False, True))
    assert float(expected.norm()) > 1
    assert float((found - expected).norm() / expected.norm()) < 0.02


class Waits(nn.Module):
    """A part of a model that cannot be captured: it looks at what is computed."""

    def forward(self, states: Tensor) -> Tensor:
        return states * (1.0 if float(states.detach().sum()) < 1e9 else 2.0)


def test_a_model_that_waits_for_the_gpu_is_computed() -> None:
    policy = model()
    norm = policy.model.layers[1].post_attention_layernorm
    policy.model.layers[1].post_attention_layernorm = nn.Sequential(norm, Waits())
    batches = [rows(prompts=4, siblings=8, asked=40, answered=104)] * 2
    expected, gradient = outcome(policy, batches)
    with (
        replaying(CapturedPasses(policy.get_decoder(), torch.bfloat16)),
        pytest.warns(UserWarning, match="cannot be captured"),
    ):
        found, other = outcome(policy, batches)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02)
    assert float((other - gradient).norm() / gradient.norm()) < 0.02


def test_a_capture_that_fails_leaves_no_trace() -> None:
    """Neither in random numbers, nor in memory, nor in captures from before and after."""
    place = torch.zeros(4, device="cuda")
    before, after, broken = (torch.cuda.CUDAGraph() for _ in range(3))
    pool, stream = Pool(), torch.cuda.current_stream()
    with capturing(before, pool):
        place.add_(torch.ones(4, device="cuda"))
    reserved = torch.cuda.memory_reserved()

    def look() -> float:
        many = torch.zeros(1 << 26, device="cuda")  # 256 MB
        return float(many.sum())

    with pytest.raises(CaptureError, match="cannot be captured"), capturing(broken, pool):
        look()
    assert torch.cuda.current_stream() == stream
    assert torch.randn(4, device="cuda").shape == (4,)
    with capturing(after, Pool()):
        place.mul_(2)
    before.replay()
    after.replay()
    assert place.tolist() == [2.0] * 4
    del broken, after, before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_a_capture_for_which_there_is_no_memory() -> None:
    place = torch.zeros(4, device="cuda")

    def record() -> None:
        with capturing(torch.cuda.CUDAGraph(), Pool()):
            place.add_(1)
            torch.zeros(1 << 40, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        record()
    assert torch.randn(4, device="cuda").shape == (4,)


def test_two_threads_capture_in_turns() -> None:
    """As a sampler that runs ahead and a learner do; each may empty the cache meanwhile."""
    found: list[float] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            place = torch.zeros(1, device="cuda")
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, Pool()):
                    place.add_(torch.ones(1, device="cuda"))
                graph.replay()
                empty_cache()
            torch.cuda.current_stream().synchronize()
            found.append(float(place))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20.0, 20.0]


def test_a_capture_outlives_those_before_it() -> None:
    """Products in parts need a workspace, which must not belong to a capture that has gone."""
    left, right = (torch.randn(*shape, device="cuda").bfloat16() for shape in SHAPES)
    out = torch.empty(SHAPES[0][0], SHAPES[1][1], device="cuda", dtype=torch.bfloat16)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.mm(left, right, out=out)
    expected = out.clone()
    for graph in (first, second):
        with capturing(graph, Pool()):
            torch.mm(left, right, out=out)
    del first, graph
    empty_cache()
    others = [torch.full((1 << 24,), 7.0, device="cuda") for _ in range(8)]
    out.zero_()
    for _ in range(3):
        second.replay()
    assert torch.equal(out, expected)
    assert all(bool((other == 7).all()) for other in others)
