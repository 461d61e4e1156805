"""What flows after collate: a batch of sequences as tensors, its spans, the terms of a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

_FLOATING_PER_TOKEN = (
    "sampler_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "divergence",
    "values",
    "turn_rewards",
    "token_rewards",
    "advantages",
    "returns",
    "correction",
    "weights",
)
_PER_TOKEN = ("tokens", "mask", "attention", "turns", *_FLOATING_PER_TOKEN)
_PER_SEQUENCE = (
    "rewards",
    "valid",
    "groups",
    "truncated",
    "versions",
    "score_norms",
    "margins",
    "greedy_rewards",
)
_BOOLEAN = ("mask", "attention", "valid", "truncated")
_FLOATING = (
    *("rewards", "score_norms", "margins", "greedy_rewards", "baseline"),
    *_FLOATING_PER_TOKEN,
)

# Fields that invalidate the cached CPU copy.
_STRUCTURE = ("tokens", "mask", "attention", "groups", "valid")

# Which function adds a field, for the error about a missing one.
_ADDED_BY = {
    "rewards": "collate (from the scores)",
    "groups": "collate",
    "sampler_logprobs": "collate (from the engine)",
    "old_logprobs": "Learner.infer, before the first optimiser step",
    "ref_logprobs": "Learner.infer with a reference model",
    "teacher_logprobs": "Learner.infer with a teacher",
    "divergence": "the objective, for a loss that declares one (pieces.piece)",
    "values": "Learner.infer with a critic",
    "turns": "collate (where a rollout has several turns of the policy)",
    "turn_rewards": "collate (where a rollout earned something before its end)",
    "token_rewards": "posttrain.algorithms.shaping.score_at_last_token",
    "advantages": "a function of posttrain.algorithms.advantages",
    "returns": "posttrain.algorithms.advantages.gae",
    "weights": "a function of posttrain.algorithms.weights",
    "baseline": "the loop, for advantages that use a moving baseline and for the loss kto",
    "score_norms": "the caller: the squared norm of each sequence's score function",
    "margins": "posttrain.data.collate.collate_ranked",
    "greedy_rewards": "collate (a source samples greedily where the advantage declares the need)",
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences as tensors. Stages never change one: they return a copy with fields added.

    =====================  =======  ==========================================================
    field                  shape    meaning
    =====================  =======  ==========================================================
    ``tokens``             [B, T]   token ids, prompt and completion
    ``mask``               [B, T]   True where the policy chose the token
    ``attention``          [B, T]   True where the token is real, False where it is padding
    ``turns``              [B, T]   which turn of the policy the token is in, from 0, −1 where it
                                    chose none; None where no sequence has several
    ``rewards``            [B]      reward of the whole sequence
    ``valid``              [B]      False where the grader broke: no baseline, no loss, no metric
    ``groups``             [B]      sequences with equal numbers answer the same prompt
    ``truncated``          [B]      True where the length limit cut the completion
    ``versions``           [B]      policy version that sampled the sequence
    ``sampler_logprobs``   [B, T]   log-prob that the engine reported
    ``old_logprobs``       [B, T]   the trainer's log-prob when the batch was made
    ``ref_logprobs``       [B, T]   the reference model's log-prob
    ``teacher_logprobs``   [B, T]   the teacher's log-prob
    ``divergence``         [B, T]   of the whole distributions of policy and teacher, with gradient
    ``values``             [B, T]   the critic's estimate, used to make advantages
    ``turn_rewards``       [B, T]   what of ``rewards`` was earned before the end, at the tokens
                                    that earned it; None where no sequence earned any
    ``token_rewards``      [B, T]   reward of each token
    ``advantages``         [B, T]   how much better than expected
    ``returns``            [B, T]   the critic's targets
    ``correction``         [B, T]   importance factor for sampler-trainer mismatch
    ``weights``            [B, T]   averaging, as data: the update is Σ weights · loss
    ``score_norms``        [B]      squared norm of ∇ log π of each sequence
    ``margins``            [B]      by how much the best of a ranked set should win
    ``greedy_rewards``     [B]      score of the greedy completion of the same prompt, NaN where
                                    its grader broke: a baseline for each sequence
    ``baseline``           []       one number for all: a running mean of earlier rewards, or the
                                    divergence from the reference that KTO compares with
    =====================  =======  ==========================================================

    >>> batch = Batch.from_rewards([1.0, 0.0], groups=[0, 0])
    >>> batch.replace(rewards=torch.tensor([2.0, 0.0])).rewards
    tensor([2., 0.])
    """

    tokens: Tensor
    mask: Tensor
    attention: Tensor | None = None
    turns: Tensor | None = None
    rewards: Tensor | None = None
    valid: Tensor | None = None
    groups: Tensor | None = None
    truncated: Tensor | None = None
    versions: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    divergence: Tensor | None = None
    values: Tensor | None = None
    turn_rewards: Tensor | None = None
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None
    weights: Tensor | None = None
    score_norms: Tensor | None = None
    margins: Tensor | None = None
    greedy_rewards: Tensor | None = None
    baseline: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2:
            raise ValueError(f"tokens: expected shape [B, T], got {list(self.tokens.shape)}")
        for name in _PER_TOKEN:
            self._check_shape(name, tuple(self.tokens.shape))
        for name in _PER_SEQUENCE:
            self._check_shape(name, (self.tokens.shape[0],))
        self._check_shape("baseline", ())
        for name in _BOOLEAN:
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.bool:
                raise ValueError(f"{name}: expected a bool tensor, got {tensor.dtype}")
        for name in _FLOATING:  # an integer type would cut advantages down to whole numbers
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"{name}: expected a floating tensor, got {tensor.dtype}")

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name}: expected shape {list(expected)} to match tokens "
                f"{list(self.tokens.shape)}, got {list(tensor.shape)}"
            )

    @classmethod
    def from_rewards(
        cls, rewards: Sequence[float] | Tensor, *, groups: Sequence[int] | None = None
    ) -> Self:
        """One-token sequences with these rewards, by default in one group: for examples.

        >>> Batch.from_rewards([1.0, 0.0]).mask
        tensor([[True],
                [True]])
        """
        values = torch.as_tensor(rewards, dtype=torch.float64)
        if values.ndim != 1:
            raise ValueError(f"rewards: expected shape [B], got {list(values.shape)}")
        size = values.shape[0]
        return cls(
            tokens=torch.zeros(size, 1, dtype=torch.long),
            mask=torch.ones(size, 1, dtype=torch.bool),
            rewards=values,
            groups=torch.as_tensor([0] * size if groups is None else groups),
        )

    @classmethod
    def from_tensors(cls, mask: Tensor, **fields: Tensor) -> Self:
        """A batch without token ids: the functions of ``posttrain.algorithms`` read none.

        ``mask`` may hold any numbers of which 0 means that the policy did not choose the token. In
        place of the token ids stands −1, which no vocabulary has: a model refuses it.

        >>> mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
        >>> batch = Batch.from_tensors(mask, rewards=torch.tensor([1.0, 0.0]))
        >>> batch.mask.sum(dim=1), batch.tokens[0]
        (tensor([2, 1]), tensor([-1, -1, -1]))
        """
        if mask.ndim != 2:
            raise ValueError(f"mask: expected shape [B, T], got {list(mask.shape)}")
        missing = torch.full(mask.shape, -1, dtype=torch.long, device=mask.device)
        return cls(**{"tokens": missing, **fields}, mask=mask.bool())

    @property
    def active(self) -> Tensor:
        """[B, T] bool: tokens the policy chose, in sequences whose grader did not break."""
        return self.mask if self.valid is None else self.mask & self.valid[:, None]

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of per-token terms: that of the log-probs, else of the rewards."""
        for tensor in (self.old_logprobs, self.sampler_logprobs, self.rewards):
            if tensor is not None:
                return tensor.dtype
        return torch.get_default_dtype()

    def need(self, name: str) -> Tensor:
        """The field ``name``, or an error that says which stage adds it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            source = _ADDED_BY.get(name, "the caller")
            raise ValueError(f"{name}: this batch has none; it is added by {source}")
        return tensor

    def replace(self, **fields: Any) -> Self:
        """A copy with these fields set."""
        copy = dataclasses.replace(self, **fields)
        if "_host" in vars(self) and not fields.keys() & set(_STRUCTURE):
            object.__setattr__(copy, "_host", self.host)
        return copy

    @property
    def host(self) -> Self:
        """The batch on the CPU, where tokens, masks and groups are read without a device sync.

        A batch that was moved to a device keeps the CPU batch it was made from.
        """
        if self.tokens.device.type == "cpu":
            return self
        known: Self | None = vars(self).get("_host")
        return self.to("cpu") if known is None else known

    def select(self, rows: Tensor) -> Self:
        """The sequences ``rows`` (indices or a bool mask), with every field they carry.

        >>> Batch.from_rewards([1.0, 2.0, 3.0]).select(torch.tensor([2, 0])).rewards
        tensor([3., 1.], dtype=torch.float64)
        """
        return self._map(lambda tensor: tensor[rows])

    def trim(self, width: int) -> Self:
        """The first ``width`` columns of every per-token field, to drop columns of padding."""
        tensors = {name: getattr(self, name) for name in _PER_TOKEN}
        return self.replace(
            **{name: tensor[:, :width] for name, tensor in tensors.items() if tensor is not None}
        )

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        moved = self._map(lambda tensor: send(tensor, device))
        if self.baseline is not None:
            moved = moved.replace(baseline=send(self.baseline, device))
        if self.tokens.device.type == "cpu" != moved.tokens.device.type:
            object.__setattr__(moved, "_host", self)
        return moved

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: getattr(self, name) for name in (*_PER_TOKEN, *_PER_SEQUENCE)}
        return self.replace(
            **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None}
        )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a loss returns: terms per token, never a mean, so that any split adds up exactly.

    ``loss`` is ``[B, T]`` and enters the update as ``Σ weights · correction · loss``; ``parts``
    are its summands by name. ``means`` are diagnostics ``[B, T]`` to be averaged over active
    tokens; ``weighted`` ones are summed as the loss is, ``Σ weights · value``; of ``maxima`` the
    largest value is reported. All are zero where ``Batch.active`` is False.
    """

    loss: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Tensor] = field(default_factory=dict)
    weighted: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


class TokenSpans(NamedTuple):
    """Of every sequence: where the policy's tokens begin and end, and whose prompt it has.

    ``first[b]`` is the index of the first token that the policy chose, so also the length of the
    prompt; ``end[b]`` is one beyond the last. ``owner[b]`` is the first sequence with the same
    prompt. A sequence without a chosen token has 0, 0 and itself.
    """

    first: list[int]
    end: list[int]
    owner: list[int]


def chosen_indices(batch: Batch) -> Tensor:
    """Indices where ``batch.mask.flatten()`` is True, without a device sync. Shapes: [B, T] → [M].

    >>> chosen_indices(Batch(tokens=torch.ones(1, 3).long(), mask=torch.tensor([[0, 1, 1]]).bool()))
    tensor([1, 2])
    """
    return send(batch.host.mask.flatten().nonzero()[:, 0], batch.tokens.device)


def spans(batch: Batch) -> TokenSpans:
    """The spans of a batch; prompts are compared token by token, because groups may be wrong.

    >>> tokens = torch.tensor([[4, 5, 6], [4, 5, 7], [4, 9, 9]])
    >>> mask = torch.tensor([[False, False, True], [False, False, True], [False, True, True]])
    >>> spans(Batch(tokens=tokens, mask=mask))
    TokenSpans(first=[2, 2, 1], end=[3, 3, 3], owner=[0, 0, 2])
    """
    chosen = batch.mask.any(dim=1)
    begins = batch.mask.long().argmax(dim=1)
    ends = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1, device=begins.device)).amax(dim=1)
    # One copy from the device for all three tensors.
    answers = torch.stack([chosen.long(), begins, ends]).tolist()
    active, first, end = answers
    rows = batch.tokens.cpu().contiguous().numpy()
    seen: dict[bytes, int] = {}
    owner = [
        seen.setdefault(rows[row, : first[row]].tobytes(), row) if active[row] else row
        for row in range(len(first))
    ]
    return TokenSpans(first=first, end=end, owner=owner)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; the copy to a GPU is asynchronous.

    A plain copy of more than a few kilobytes would wait for all kernels queued before it; one from
    pinned memory does not. What comes from a GPU may be read at once.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
