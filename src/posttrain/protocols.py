"""What a part must do to take its place in the loop: one to four methods each.

Anything with these methods fits: no base class, no registration. Each protocol has a suite in
``tests/contract``, which every implementation runs through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from posttrain.types import Collected, Observation, Part, Prompt, Rollout, Sampling, Score, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import Batch, Terms

Split = Literal["train", "test"]

# A reward's positional parameters are data, taken by name from the rollout: `prompt`, `completion`,
# `num_tokens`, `stop_reason`, and the prompt's columns (`answer`, …). Its keyword-only parameters
# are options, set in the recipe. It returns a number, or a Score where it wants to say more.
Reward = Callable[..., float | Score]

# The reply of an environment: text, messages or tokens, or one of them with a reward for the turn
# that it answers; or a score, or None, which end the rollout.
Answer = str | Sequence[Mapping[str, Any]] | Sequence[int] | Observation | float | Score | None

# The callback of an engine after every turn of the policy: it returns the environment's turn, whose
# tokens are used as they are, or None, which ends the rollout; or a Future of either, while which
# the engine samples other sequences. Sequence p·G + g is sample g of prompt p.
Reply = Callable[[Rollout, int], Turn | Future[Turn | None] | None]


class Task(Protocol):
    """Questions, what their right answers look like, and how answers are scored by default.

    A task whose answers can be checked also has an attribute ``accuracy``: the reward that does it,
    by name or as a table of a name and options.
    """

    name: str
    rewards: Mapping[str, float | Mapping[str, Any]]
    """Default rewards: name (or ``"module:function"``) to weight, or to weight and options."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, untokenised, in a fixed order; the splits share none."""
        ...

    def gold(self, prompt: Prompt) -> str:
        """A completion that deserves full marks."""
        ...


class Env(Protocol):
    """Answers the policy's turns and ends the rollout, with a score where it knows one.

    An exception makes that one rollout invalid. Sampling again with the same seed gives the same
    rollouts only where the environment answers the same turns in the same way. It may also have:

    * a keyword ``seed`` of ``start``: a number of this rollout's own, for what it draws;
    * ``opening(state) -> str``: what the policy reads behind the last message of its prompt;
    * ``close(state)``: called once when the rollout is over, however it ended;
    * ``tools``: JSON schemas of the functions that the policy may call, for its chat template;
    * ``scores = False``: it never ends a rollout with a score, so that rewards must;
    * coroutines (``async def``) in the place of any of these methods.
    """

    def start(self, prompt: Prompt) -> Any:
        """The state of one rollout, which ``reply`` gets; each rollout has its own."""
        ...

    def reply(self, state: Any, turn: Turn) -> Answer:
        """The reply to the policy's turn, or the end of the rollout.

        Text, messages of a chat or tokens are read, and the policy has another turn; an
        ``Observation`` is one of them with a reward for the turn, or for each of its tokens. A
        number or a ``Score`` ends the rollout with that score, added to those rewards; None ends
        it, and the rewards' score is added to them.
        """
        ...


class Engine(Protocol):
    """Samples completions from a policy, and says how likely each sampled token was.

    It may also have a method ``way()`` that returns a :class:`posttrain.types.ways.Way`.
    """

    version: int
    """The policy version whose weights it samples from."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        reply: Reply | None = None,
        part: Part | None = None,
    ) -> list[list[Rollout]]:
        """``num_samples`` unscored rollouts of each prompt, in order; the seed decides every token.

        The same seed, prompts and weights give the same tokens, and what one sequence samples
        does not depend on when another one ends. ``reply`` is asked after every turn: what it
        answers is read, and the policy has another turn; without an answer the rollout is over.
        It is over too where the context leaves no room for ``max_new_tokens`` more. ``part`` says
        that these sequences are some of a larger call: they draw what they draw there.
        """
        ...

    def sync(self, learner: Learner) -> Sync:
        """How this engine gets the learner's weights; asked once, before the first step."""
        ...

    def close(self) -> None:
        """End what runs beside this process and give memory back; nothing is sampled after it."""
        ...


class Sync(Protocol):
    """Brings the learner's current weights to the engine that gave it."""

    def __call__(self, version: int) -> None:
        """After this returns, the engine samples from the weights of ``version``."""
        ...


class Scorer(Protocol):
    """Scores rollouts. A wrong answer is 0; a broken grader is a ``Score`` in another state."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, in order; never raises for what a grader did."""
        ...


class Sampler(Protocol):
    """Samples and scores: an engine and a scorer, put together."""

    def __call__(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> Collected:
        """``num_samples`` scored rollouts of each prompt; ``group`` numbers the prompts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the learner's model says about a micro-batch, indexed by token, with gradient.

    Of a policy: ``logprobs`` [B, T] of the tokens, ``entropy`` [B, T] of the distributions they
    came from, and, where the objective asks for it, the ``divergence`` [B, T] of these from a
    teacher's. Of a critic: ``values`` [B, T]. Of a reward model: ``scores`` [B] of the sequences.
    Entries where ``Batch.mask`` is False mean nothing.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None

    def need(self, name: Literal["logprobs", "values", "scores"]) -> Tensor:
        """The output ``name``, or an error that says which model gives it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            model = {"logprobs": "policy", "values": "critic", "scores": "reward model"}[name]
            raise ValueError(f"{name}: the learner gave none; they come from a {model}")
        return tensor


@dataclass(frozen=True)
class Objective:
    """What a step minimises: ``terms(outputs, micro-batch)``, one loss for each token.

    It pickles where ``terms`` does, so that a learner may live in another process. With
    ``only_critic`` the policy is left as it is, and the outputs are the critic's alone.
    ``divergence`` is a function of the policy's and the teacher's logits, [N, V] × 2 → [N]: the
    learner has a teacher then, and the outputs have its value and gradient at every token.
    ``recorded`` [B] marks sequences of the batch whose numbers the result is to hold.
    """

    terms: Callable[[Outputs, Batch], Terms]
    only_critic: bool = False
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None
    recorded: Tensor | None = None

    def __call__(self, outputs: Outputs, batch: Batch) -> Terms:
        return self.terms(outputs, batch)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimiser step did; ``metrics`` are the objective's diagnostics over its tokens.

    ``skipped`` says that loss or gradient was not finite, and that nothing was changed. ``tokens``
    are the numbers of the K sequences that the objective has ``recorded``, in their order, [K, T]
    on the CPU: what the model said (``logprobs``, ``entropy``, ``values``, ``divergence``), the
    ``loss``, and where the loss has stopped a token (``clip_low``, ``clip_high``).
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    skipped: bool = False
    tokens: Mapping[str, Tensor] = field(default_factory=dict)


class Learner(Protocol):
    """Owns the trainable weights and their optimiser.

    It may also have a method ``way(longest)`` that returns a :class:`posttrain.types.ways.Way`, of
    sequences of at most ``longest`` tokens.
    """

    version: int
    """How many times the weights have been handed to the engine as a new policy."""

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a forward pass; who measures what fits does so when first asked."""
        ...

    def infer(self, batch: Batch) -> Batch:
        """Add what the models say without gradient: log-probs (also of a teacher), values."""
        ...

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """Exactly one optimiser step on ``Σ weights · objective``, in micro-batches that fit."""
        ...

    def refresh_reference(self) -> None:
        """Make the current weights the reference that ``infer`` compares with."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of the policy by name, the trained tensors themselves: engines only read."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights as an ordinary Hugging Face model folder."""
        ...

    def state(self, folder: Path) -> dict[str, Any]:
        """Write all that the next step depends on; what is no tensor is returned, for JSON."""
        ...

    def restore(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Make a learner of the same recipe what it was when :meth:`state` wrote it."""
        ...


class Tracker(Protocol):
    """Takes the numbers of a run.

    It may also have a method ``log_samples(step, rows)``: ``rows()`` are some rollouts of a step.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is still held back."""
        ...
