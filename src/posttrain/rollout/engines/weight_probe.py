"""Proof that an engine has the learner's weights: both say how likely the same few tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from posttrain.data.collate import collate
from posttrain.types import Batch, Prompt, Rollout, Sampling, Score, Turn

SAMPLES, TOKENS = 4, 8  # of the probe: enough that wrong weights show, too few to take time
SHARED = 0.5  # of the tokens that a replacement must draw as the engines before it did


@dataclass(frozen=True, kw_only=True)
class WeightProbe:
    """A few tokens of a fixed prompt, drawn at the temperature that the learner computes with."""

    prompt: Prompt
    temperature: float = 1.0
    pad_token: int = 0

    @property
    def sampling(self) -> Sampling:
        """How an engine draws them, in ``SAMPLES`` completions."""
        return Sampling(max_new_tokens=TOKENS, temperature=self.temperature)

    def scored(
        self, drawn: Sequence[Sequence[Turn]], score: Callable[[Batch], Tensor]
    ) -> list[list[Turn]]:
        """The turns of each engine with the log-probs that ``score`` gives their tokens, [B, T]."""
        rollouts = [
            Rollout(prompt=self.prompt, turns=(turn,), group=number, score=Score(value=0.0))
            for number, turn in enumerate(turn for each in drawn for turn in each)
        ]
        batch = collate(rollouts, pad_token=self.pad_token)
        known = score(batch).cpu()
        turns = iter(
            replace(rollout.turns[0], logprobs=tuple(known[row][batch.mask[row]].tolist()))
            for row, rollout in enumerate(rollouts)
        )
        return [[next(turns) for _ in each] for each in drawn]


def why_unproven(drawn: Sequence[Turn], known: Sequence[Turn], *, tolerance: float) -> str:
    """Why these turns do not come from the weights that ``known`` were scored by, or nothing.

    Log-probs may lie ``tolerance`` apart, in the mean over the tokens: arithmetic rounds
    differently. An engine on other hardware may draw another token where two are as likely as each
    other: what follows it cannot be compared.
    """
    apart: list[float] = []
    for mine, other in zip(drawn, known, strict=True):
        assert mine.logprobs is not None
        assert other.logprobs is not None
        for number, token in enumerate(mine.tokens[: len(other.tokens)]):
            if token != other.tokens[number]:
                break
            apart.append(abs(mine.logprobs[number] - other.logprobs[number]))
    total = sum(len(turn.tokens) for turn in known)
    if len(apart) < SHARED * total:
        return f"it draws other tokens, {total - len(apart)} of {total}"
    mean = sum(apart) / len(apart)
    if not mean <= tolerance:  # NaN too
        return f"{mean:.2g} nats a token apart from the learner ({tolerance:g} is rounding)"
    return ""
