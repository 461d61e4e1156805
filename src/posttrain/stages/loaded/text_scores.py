"""How likely a model finds texts that are given: log-probs of their tokens, never sampled again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from posttrain.data.collate import collate_demonstrations
from posttrain.data.template import Template
from posttrain.fast.score import score_tokens
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.rollout.engines.local import LocalEngine
from posttrain.types import Prompt
from posttrain.types.text import shortened

Row = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them are scored."""
PASS_TOKENS = 8192  # of one forward pass, padding counted


@dataclass(frozen=True, kw_only=True, repr=False)
class Scored:
    """The tokens of a text that were scored, what each spells, and its log-prob.

    >>> scored = Scored(text="ab", tokens=(5, 6), texts=("a", "b"), logprobs=(-0.5, -1.5))
    >>> scored.sum, scored.mean, round(scored.perplexity, 3)
    (-2.0, -1.0, 2.718)
    >>> scored
    Scored('ab': 2 tokens, log-prob -2.000, perplexity 2.718)
    """

    text: str
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def sum(self) -> float:
        """The log-probability of all of them, one after the other."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """The mean log-probability of a token."""
        return self.sum / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """``exp(−mean)``: among how many equally likely tokens the model would have to choose."""
        return math.exp(min(-self.mean, 700.0))

    def __repr__(self) -> str:
        text, count = shortened(self.text, 40), len(self.tokens)
        numbers = f"log-prob {self.sum:.3f}, perplexity {self.perplexity:.4g}"
        return f"Scored({text!r}: {count} token{'s' * (count != 1)}, {numbers})"


def plain_tokens(text: str, policy: Policy) -> tuple[int, ...]:
    """A text as it stands, without a chat, behind the token that the model begins texts with."""
    plain = Template(policy.tokenizer, chat=False, end_tokens=policy.end_tokens)
    return plain.render(Prompt(id="text", text=text)).tokens


def text_row(text: str, policy: Policy) -> Row:
    """A text as it stands: all of it but the token that it begins with."""
    tokens = plain_tokens(text, policy)
    if len(tokens) < 2:
        raise ValueError(
            f"text {text!r}: it is one token, and nothing stands before it to score it by; give a "
            "longer one, or (prompt, completion)"
        )
    return tokens, (False, *(True for _ in tokens[1:]))


def completed_row(prompt: Prompt, completion: str, *, template: Template, end: bool) -> Row:
    """A completion behind its prompt, and the end of it where that is asked for."""
    if not isinstance(completion, str):
        raise ValueError(f"completion: expected a text, got {completion!r}")
    last = template.tokenizer.eos_token_id
    tokens = template.encode_completion(completion, last, ended=end)
    if not tokens:
        raise ValueError(
            f"completion of {prompt.id!r}: it has no tokens to score; end=True scores its end"
        )
    return (*prompt.tokens, *tokens), (*(False for _ in prompt.tokens), *(True for _ in tokens))


def chat_row(messages: Sequence[Mapping[str, str]], template: Template) -> Row:
    """A conversation: what the assistant wrote, up to the end of each of its turns."""
    rows = template.render_conversation(messages)
    if len(rows) > 1:
        raise ValueError(
            "messages: the chat template writes earlier turns differently once more follows; score "
            "each turn as (the messages before it, completion)"
        )
    return rows[0]


@torch.no_grad()
def score_rows(
    rows: Sequence[Row], policy: Policy, *, engine: LocalEngine, temperature: float
) -> list[Scored]:
    """The log-probs of each row, of similar lengths in one pass, in the order they were given."""
    limit = context_length(policy.model)
    too_long = max((len(tokens) for tokens, _ in rows), default=0)
    if limit is not None and too_long > limit:
        raise ValueError(
            f"texts: one has {too_long} tokens, and the model's context length is {limit}; give "
            "shorter ones"
        )
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
    found: dict[int, Scored] = {}
    while order:
        count = max(1, PASS_TOKENS // len(rows[order[-1]][0]))
        some, order = order[-count:], order[:-count]
        batch = collate_demonstrations([rows[n] for n in some], pad_token=policy.pad_token)
        batch = batch.to(policy.model.device)
        with engine.evaluating(), engine.precision():
            said = score_tokens(policy.model, batch, temperature=temperature, entropy="none")
        logprobs = said.need("logprobs").double().cpu()
        for place, number in enumerate(some):
            tokens, mask = rows[number]
            chosen = [token for token, scored in zip(tokens, mask, strict=True) if scored]
            kept = logprobs[place][: len(mask)][torch.tensor(mask)]
            texts = policy.tokenizer.batch_decode([[token] for token in chosen])
            found[number] = Scored(
                text=engine.decode(chosen),
                tokens=tuple(chosen),
                texts=tuple(texts),
                logprobs=tuple(kept.tolist()),
            )
    return [found[number] for number in range(len(rows))]
