"""score_tokens against whole logits, one sequence at a time; chunks, padding and dtypes."""

import logging

import pytest
import torch
import transformers
from models.families import FAMILIES, VOCABULARY, batch, build, naive

from posttrain.fast import token_scores as fast_scores
from posttrain.fast.score import score_tokens
from posttrain.models import head
from posttrain.models.sampling import sample
from posttrain.types import Batch, Sampling


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def close(actual: torch.Tensor, expected: torch.Tensor, *, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol, check_dtype=False)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_whole_logits_with_gradient(name: str) -> None:
    model, given = build(name), batch()
    expected, entropies = naive(model, given)
    weights = torch.linspace(-1, 2, given.tokens.numel(), dtype=torch.float64).view(
        given.tokens.shape
    )
    wanted = gradients(model, (weights * (expected + 0.1 * entropies)).sum())
    found = score_tokens(model, given, entropy="gradient", chunk_elements=3 * VOCABULARY)
    close(found.logprobs, expected)
    close(found.entropy, entropies)
    assert found.logprobs.dtype == torch.float64
    got = gradients(model, (weights * (found.logprobs + 0.1 * found.entropy)).sum())
    assert got.keys() == wanted.keys()
    for key, gradient in wanted.items():
        close(got[key], gradient, rtol=1e-8)
    assert getattr(model, head._VERDICT), "the fast path was not taken"
    assert expected[given.mask].min() < -4, "the distributions are too flat to show a mistake"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_float32_agrees_to_1e_5_and_gradients_to_1e_4(name: str) -> None:
    given = batch()
    exact, model = build(name), build(name, dtype=torch.float32)
    found = score_tokens(model, given, chunk_elements=4 * VOCABULARY)
    expected, entropies = naive(exact, given)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    scale = expected.abs().max()
    assert (found.logprobs - expected).abs().max() / scale < 1e-5
    assert (found.entropy - entropies).abs().max() < 1e-5
    wanted = gradients(exact, expected.sum())
    for key, gradient in gradients(model, found.logprobs.sum()).items():
        error = (gradient - wanted[key]).norm() / wanted[key].norm().clamp_min(1e-3)
        assert error < 1e-4, key


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_neighbours_change_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, logger = build(name), logging.getLogger("transformers")
    caplog.clear()  # building one may warn; scoring may not
    transformers.utils.logging.warning_once.cache_clear()  # an earlier test may have had it
    logger.addHandler(caplog.handler)
    try:
        with torch.no_grad():
            together = score_tokens(model, batch(width=14, pad=3)).logprobs
            other_pad = score_tokens(model, batch(width=14, pad=11)).logprobs
            given = batch()
            for row, length in enumerate((9, 6, 4)):
                alone = given.select(torch.tensor([row]))
                alone = Batch(tokens=alone.tokens[:, :length], mask=alone.mask[:, :length])
                close(together[row, :length], score_tokens(model, alone).logprobs[0])
        # Padding with another id: only the end token, which stands for both here, is another one.
        close(other_pad[0, :8], together[0, :8])
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_end_token_is_scored_where_it_equals_the_pad_token() -> None:
    model, given = build("llama"), batch()
    logprobs = score_tokens(model, given).logprobs
    lengths = given.attention.sum(1)
    last = logprobs[torch.arange(3), lengths - 1]
    assert (given.tokens[torch.arange(3), lengths - 1] == 3).all()
    assert (last < 0).all()
    assert (logprobs[~given.mask] == 0).all()


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("chunk_elements", [1, VOCABULARY, 5 * VOCABULARY, 2**26])
def test_chunks_change_memory_and_nothing_else(chunk_elements: int) -> None:
    model, given = build("qwen2"), batch()
    whole = score_tokens(model, given, entropy="gradient")
    wanted = gradients(model, (whole.logprobs * whole.entropy).sum())
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    parts = score_tokens(model, given, entropy="gradient", chunk_elements=chunk_elements)
    close(parts.logprobs, whole.logprobs, rtol=1e-13)
    close(parts.entropy, whole.entropy, rtol=1e-12)
    got = gradients(model, (parts.logprobs * parts.entropy).sum())
    for key, gradient in wanted.items():
        close(got[key], gradient, rtol=1e-11)
    assert max(rows) <= max(1, chunk_elements // VOCABULARY)
    tokens = int(given.mask.sum())
    assert sum(rows) == (tokens if len(rows) == 1 else 2 * tokens)  # forward, and again backward


@pytest.mark.usefixtures("float64_throughout")
def test_chunks_that_are_kept_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with memory to spare; a second backward computes them again."""
    model, given = build("qwen2"), batch()
    model.lm_head.weight.requires_grad_(True)

    def scored() -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        computed: list[int] = []
        logits = fast_scores._Head.logits
        with monkeypatch.context() as patch:
            patch.setattr(
                fast_scores._Head,
                "logits",
                lambda self, *given: computed.append(1) or logits(self, *given),
            )
            found = score_tokens(model, given, entropy="gradient")
            loss = (found.logprobs * found.entropy).sum()
            return found.logprobs, gradients(model, loss), len(computed)

    monkeypatch.setattr(fast_scores, "chunk_elements_for", lambda device: 3 * VOCABULARY)
    monkeypatch.setattr(fast_scores, "kept_elements_for", lambda device: 0)
    logprobs, wanted, twice = scored()
    monkeypatch.setattr(fast_scores, "kept_elements_for", lambda device: 10**6 * VOCABULARY)
    found, got, once = scored()
    assert twice == 2 * once > 2
    assert torch.equal(found, logprobs)
    for name, gradient in wanted.items():
        close(got[name], gradient, rtol=1e-12)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_entropy_modes(entropy: str) -> None:
    model, given = build("llama"), batch()
    found = score_tokens(model, given, entropy=entropy)
    assert found.logprobs.requires_grad
    if entropy == "none":
        assert found.entropy is None
    else:
        assert found.entropy.requires_grad == (entropy == "gradient")


def test_no_gradient_where_gradients_are_off() -> None:
    with torch.no_grad():
        found = score_tokens(build("llama"), batch(), entropy="gradient", chunk_elements=1)
    assert not found.logprobs.requires_grad
    assert not found.entropy.requires_grad


def test_an_empty_mask_gives_zeros_and_a_zero_gradient() -> None:
    model, given = build("llama"), batch()
    found = score_tokens(model, given.replace(mask=torch.zeros_like(given.mask)))
    assert (found.logprobs == 0).all()
    assert (found.entropy == 0).all()
    got = gradients(model, found.logprobs.sum())
    assert got
    assert all((gradient == 0).all() for gradient in got.values())


@pytest.mark.usefixtures("float64_throughout")
def test_temperature_divides_logits_and_zero_means_one() -> None:
    model, given = build("llama"), batch()
    logits = model(input_ids=given.tokens, use_cache=False).logits
    half = torch.log_softmax(logits[:, :-1] / 0.5, -1)
    expected = half.gather(-1, given.tokens[:, 1:, None]).squeeze(-1)
    found = score_tokens(model, given, temperature=0.5).logprobs
    close(found[:, 1:][given.mask[:, 1:]], expected[given.mask[:, 1:]])
    greedy = score_tokens(model, given, temperature=0.0).logprobs
    assert torch.equal(greedy, score_tokens(model, given).logprobs)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.7},
        {"temperature": 0.0},
    ],
)
def test_agrees_with_the_sampler_about_what_it_drew(options: dict[str, float]) -> None:
    model, given = build("llama"), batch(lengths=(9, 9, 9))
    sampling, generator = Sampling(**options), torch.Generator().manual_seed(1)
    tokens, drawn = given.tokens.clone(), torch.zeros(3, 9, dtype=torch.float64)
    with torch.no_grad():
        for position in range(2, 9):
            logits = model(input_ids=tokens[:, :position], use_cache=False).logits[:, -1]
            uniforms = torch.rand(3, generator=generator)
            tokens[:, position], drawn[:, position] = sample(logits, uniforms, sampling=sampling)
        mask = torch.zeros(3, 9, dtype=torch.bool)
        mask[:, 2:] = True
        found = score_tokens(model, Batch(tokens=tokens, mask=mask), **options)
    close(found.logprobs, drawn)
    if options == {"top_k": 3}:
        assert (found.entropy <= torch.tensor(3.0).log() + 1e-9).all()


def test_a_token_outside_the_truncated_set_stays_finite_and_can_be_learned() -> None:
    model, given = build("llama"), batch()
    found = score_tokens(model, given, top_k=1, entropy="gradient")
    assert torch.isfinite(found.logprobs).all()
    assert torch.isfinite(found.entropy).all()
    assert (found.logprobs < -1).any()
    got = gradients(model, found.logprobs.sum() + found.entropy.sum())
    assert all(torch.isfinite(gradient).all() for gradient in got.values())


def test_half_precision_does_not_round_the_logits() -> None:
    model, given = build("llama", dtype=torch.bfloat16), batch()
    found = score_tokens(model, given, chunk_elements=3 * VOCABULARY)
    assert found.logprobs.dtype == torch.float32
    states = head.trunk_states(model.get_decoder(), given.tokens)
    logits = states.double() @ model.lm_head.weight.double().t()
    exact = torch.log_softmax(logits[:, :-1], -1).gather(-1, given.tokens[:, 1:, None]).squeeze(-1)
    close(found.logprobs[:, 1:][given.mask[:, 1:]], exact[given.mask[:, 1:]], rtol=1e-6)
    # The model's own logits are rounded: they agree roughly, and gradients do too.
    rounded, _ = naive(model, given)
    close(found.logprobs, rounded, rtol=0.05)
    wanted = gradients(model, exact[given.mask[:, 1:]].sum())
    got = gradients(model, found.logprobs.sum())
    for key, gradient in wanted.items():
        assert (got[key] - gradient).norm() / gradient.norm() < 0.05, key


def test_autocast_keeps_float32_logits_and_reaches_the_master_weights() -> None:
    model, given = build("llama", dtype=torch.float32), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score_tokens(model, given, chunk_elements=3 * VOCABULARY)
    expected, _ = naive(model, given)
    assert found.logprobs.dtype == torch.float32
    close(found.logprobs, expected, rtol=0.1)
    wanted, got = gradients(model, expected.sum()), gradients(model, found.logprobs.sum())
    for key, gradient in wanted.items():
        assert got[key].dtype == torch.float32
        assert (got[key] - gradient).norm() / gradient.norm() < 0.1, key


class Strange(transformers.LlamaForCausalLM):
    """A model that does to its logits what nobody could guess."""

    def forward(self, *inputs: object, **options: object) -> object:
        output = super().forward(*inputs, **options)
        output.logits = output.logits * 1.001
        return output


@pytest.mark.usefixtures("float64_throughout")
def test_a_model_with_logits_of_its_own_takes_the_slow_way_and_is_right() -> None:
    model, given = build("llama"), batch()
    model.__class__ = Strange
    expected, entropies = naive(model, given)
    with pytest.warns(UserWarning, match="Strange: its logits are not its output head"):
        found = score_tokens(model, given, chunk_elements=2 * VOCABULARY, entropy="gradient")
    close(found.logprobs, expected)
    close(found.entropy, entropies)
    wanted, got = gradients(model, expected.sum()), gradients(model, found.logprobs.sum())
    for key, gradient in wanted.items():
        close(got[key], gradient, rtol=1e-8)
    score_tokens(model, given)  # no second warning: the verdict is remembered


def test_impossible_requests_say_what_to_do() -> None:
    model, given = build("llama"), batch()
    with pytest.raises(ValueError, match="give every prompt at least one token"):
        score_tokens(model, given.replace(mask=torch.ones_like(given.mask)))
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        score_tokens(model, given, temperature=-1.0)
    with pytest.raises(ValueError, match="entropy one of none, value, gradient"):
        score_tokens(model, given, entropy="all")
