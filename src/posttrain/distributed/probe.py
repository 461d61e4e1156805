"""Proof that an engine has the learner's weights: both say how likely the same few tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.data.collate import collate
from posttrain.distributed.engine_host import Sequences
from posttrain.protocols import Learner
from posttrain.types import Part, Prompt, Rollout, Sampling, Score, Turn

SAMPLES, TOKENS = 4, 8  # of the probe: enough that wrong weights show, too few to take time
SHARED = 0.5  # of the tokens that a replacement must draw as the engines before it did


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A few tokens of a fixed prompt, drawn at the temperature that the learner computes with.

    The log-probs of engine and learner may lie ``tolerance`` apart, in the mean over the tokens:
    their arithmetic rounds differently.
    """

    prompt: Prompt
    tolerance: float
    temperature: float = 1.0
    pad_token: int = 0

    @property
    def asked(self) -> Sequences:
        """What an engine is asked for."""
        return Sequences(
            prompts=[self.prompt] * SAMPLES,
            sampling=Sampling(max_new_tokens=TOKENS, temperature=self.temperature),
            seed=0,
            part=Part(numbers=tuple(range(SAMPLES))),
        )

    def scored(self, learner: Learner, drawn: Mapping[str, Sequence[Turn]]) -> list[list[Turn]]:
        """The turns of each engine, with the learner's log-probs in the place of the engine's."""
        turns = [turn for each in drawn.values() for turn in each]
        rollouts = [
            Rollout(prompt=self.prompt, turns=(turn,), group=number, score=Score(value=0.0))
            for number, turn in enumerate(turns)
        ]
        batch = learner.infer(collate(rollouts, pad_token=self.pad_token))
        known = batch.need("old_logprobs")
        scored = [
            replace(turn, logprobs=tuple(known[row][batch.mask[row]].tolist()))
            for row, turn in enumerate(turns)
        ]
        return [scored[n : n + SAMPLES] for n in range(0, len(scored), SAMPLES)]

    def problem(self, drawn: Sequence[Turn], known: Sequence[Turn]) -> str:
        """Why these turns do not come from the weights that ``known`` were scored by, or nothing.

        An engine on other hardware may draw another token where two are as likely as each other:
        what follows it cannot be compared.
        """
        apart: list[float] = []
        for mine, other in zip(drawn, known, strict=True):
            for number, token in enumerate(mine.tokens[: len(other.tokens)]):
                if token != other.tokens[number]:
                    break
                assert mine.logprobs is not None
                assert other.logprobs is not None
                apart.append(abs(mine.logprobs[number] - other.logprobs[number]))
        total = sum(len(turn.tokens) for turn in known)
        if len(apart) < SHARED * total:
            return f"it draws other tokens, {total - len(apart)} of {total}"
        mean = sum(apart) / len(apart)
        if not mean <= self.tolerance:  # NaN too
            return (
                f"{mean:.2g} nats a token apart from the learner ({self.tolerance:g} is rounding)"
            )
        return ""
