"""Row statistics and their gradient against autograd in float64: one contract for both forms.

Triton kernels run on a GPU; elsewhere by Triton's interpreter, which has to be asked for before
Triton is imported: so one test runs this file again in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from posttrain.fast import token_scores
from posttrain.fast.kernels import form_for, plain
from posttrain.models.head import Finish

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

FORMS = {"plain": plain}
if HAS_TRITON and (INTERPRETED or DEVICE == "cuda"):
    from posttrain.fast.kernels import fused

    FORMS["fused"] = fused

# Less than one block of the kernels, exactly one, and several with a rest.
SIZES = [5, 4096, 9001]
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def rows(size: int, *, count: int = 6, impossible: bool = False) -> tuple[Tensor, Tensor]:
    """Peaked logits whose largest comes late, early or never, and tokens to score."""
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(count, size, generator=generator)
    logits[0] += torch.linspace(-30, 30, size)  # the running maximum grows with every block
    logits[1] -= torch.linspace(-30, 30, size)
    logits[2] = 80.0  # all alike, and exp of it overflows
    tokens = torch.randint(0, size, (count,), generator=generator)
    if impossible:
        logits[3:, ::2] = -torch.inf
        logits[4, : size // 2] = -torch.inf  # whole blocks without a possible token
        tokens[3:] = size - 1 - size % 2
        logits[3:, size - 1 - size % 2] = 1.0
    return logits, tokens


def expected(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sums and entropies by autograd's own means, in float64."""
    scaled = logits / temperature
    every = scaled.log_softmax(-1)
    possible = every.masked_fill(torch.isneginf(every), 0.0)
    entropies = -(every.exp() * possible).sum(-1)
    return every.gather(-1, tokens[:, None])[:, 0], scaled.logsumexp(-1), entropies


@every_form
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics(form: object, size: int, impossible: bool, temperature: float) -> None:
    logits, tokens = rows(size, impossible=impossible)
    wanted = expected(logits.double(), tokens, temperature)
    given = logits.to(DEVICE), tokens.to(DEVICE)
    found = form.statistics(given[0].clone(), given[1], temperature=temperature)
    for value, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    without = form.statistics(given[0].clone(), given[1], temperature=temperature, entropy=False)
    assert torch.equal(without.logprobs, found.logprobs)
    assert (without.entropies == 0).all()


@every_form
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 90.0])
def test_gradient(
    form: object, size: int, impossible: bool, entropy: bool, cap: float | None
) -> None:
    logits, tokens = rows(size, impossible=impossible)
    temperature, generator = 0.7, torch.Generator().manual_seed(1)
    of_logprobs, of_entropies = torch.randn(2, len(tokens), generator=generator)
    # Where the logits are cap·tanh(x / cap), the gradient is the one at x.
    before = logits.double()
    if cap is not None:
        before = torch.where(torch.isneginf(logits), before, cap * torch.atanh(before / cap))
    before.requires_grad_(True)
    after = before if cap is None else cap * torch.tanh(before / cap)
    after = after.masked_fill(torch.isneginf(logits), -torch.inf)
    logprobs, log_sums, entropies = expected(after, tokens, temperature)
    loss = (of_logprobs * logprobs).sum() + entropy * (of_entropies * entropies).sum()
    (wanted,) = torch.autograd.grad(loss, before)
    columns = {"log_sums": log_sums.detach(), "of_logprobs": of_logprobs}
    if entropy:
        columns |= {"entropies": entropies.detach(), "of_entropies": of_entropies}
    given = {name: value.float().to(DEVICE) for name, value in columns.items()}
    options = given | {"temperature": temperature, "cap": cap}
    found = form.gradient(logits.clone().to(DEVICE), tokens.to(DEVICE), **options)
    assert (found.cpu().double() - wanted).norm() / wanted.norm() < 1e-5
    assert (found[logits.to(DEVICE) == -torch.inf] == 0).all()
    half = form.gradient(
        logits.clone().to(DEVICE), tokens.to(DEVICE), **options, dtype=torch.bfloat16
    )
    # One last digit: Triton's interpreter cuts where a GPU rounds.
    torch.testing.assert_close(half.float(), found.float(), rtol=2**-7, atol=1e-30)


@every_form
def test_what_is_no_number_stays_none(form: object) -> None:
    logits, tokens = rows(300)
    logits[0, 7] = torch.nan
    found = form.statistics(logits.to(DEVICE), tokens.to(DEVICE))
    assert torch.isnan(found.logprobs[0])
    assert torch.isfinite(found.logprobs[1:]).all()


@every_form
def test_no_rows_at_all(form: object) -> None:
    logits, tokens = torch.zeros(0, 7, device=DEVICE), torch.zeros(0, dtype=torch.long)
    found = form.statistics(logits, tokens.to(DEVICE))
    assert [len(part) for part in found] == [0, 0, 0]


@every_form
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 9}, {"finish": Finish(cap=5.0)}]
)
def test_scoring_with_either_form_is_the_same(
    form: object, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(7, 8, generator=generator).to(DEVICE).requires_grad_(True)
    weight = torch.randn(40, 8, generator=generator).to(DEVICE).requires_grad_(True)
    tokens = torch.randint(0, 40, (7,), generator=generator).to(DEVICE)

    def ask(chosen: object, rows: int) -> list[Tensor]:
        monkeypatch.setattr(token_scores, "form_for", lambda logits: chosen)
        logprobs, entropies = token_scores.token_scores(
            states,
            tokens,
            weight=weight,
            distribution=token_scores.Distribution(**options),
            entropy="gradient",
            chunk_elements=rows * 40,
        )
        loss = (logprobs * torch.arange(7, device=DEVICE) + 0.3 * entropies).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, (states, weight))]

    for rows in (3, 7):
        for found, wanted in zip(ask(form, rows), ask(plain, 7), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_a_cpu_and_float64_take_the_plain_form() -> None:
    assert form_for(torch.zeros(1, 2)) is plain
    assert form_for(torch.zeros(1, 2, device=DEVICE, dtype=torch.float64)) is plain


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it has no wheel of its own")
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the kernels run in this process")
def test_the_kernels_keep_the_contract_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-k", "fused", "-q", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout
