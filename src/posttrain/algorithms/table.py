"""The table of algorithms: each is a row of pieces and defaults, none is a class.

``posttrain explain`` prints it, ``posttrain explain grpo`` one row, ``posttrain explain grpo ppo``
the difference of two. To add an algorithm, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.algorithms.choices import Estimator, Placement, Rule
from posttrain.registry import Function, did_you_mean, look_up, options, split
from posttrain.written import real, written_table

Piece = Mapping[str, Any]
PieceKind = Literal[
    "advantage", "policy loss", "value loss", "averaging", "correction", "preference loss"
]

_TABLES: dict[PieceKind, tuple[str, str]] = {
    "advantage": ("posttrain.algorithms.advantages", "ADVANTAGES"),
    "policy loss": ("posttrain.algorithms.losses", "POLICY_LOSSES"),
    "value loss": ("posttrain.algorithms.losses", "VALUE_LOSSES"),
    "averaging": ("posttrain.algorithms.weights", "WEIGHTS"),
    "correction": ("posttrain.algorithms.corrections", "CORRECTIONS"),
    "preference loss": ("posttrain.algorithms.losses", "DIRECT_LOSSES"),
}

VALUE_LOSS: Piece = {"name": "clipped"}
"""The value loss of a critic where the row has none."""
CORRECTION: Piece = {"name": "truncated"}
"""The correction where the sampler is not the policy that learns."""


@dataclass(frozen=True, kw_only=True)
class KL:
    """Where the divergence from the reference model enters, and with which β."""

    placement: Placement = "none"
    coefficient: float = 0.0
    estimator: Estimator = "k3"
    rule: Rule = "fixed"
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One row: what it maximises, the pieces that do it, and the defaults it is known with.

    ``advantage``, ``loss``, ``weights`` and ``value_loss`` name functions of their tables, with
    options where they differ from the function's own defaults. ``penalty_target`` is the approx_kl
    that a penalised loss is steered to. ``group_size`` is the completions for each prompt,
    ``epochs`` the passes over each batch of rollouts.
    """

    title: str
    equation: str
    reference: str
    advantage: Piece
    loss: Piece
    weights: Piece
    kl: KL = field(default_factory=KL)
    value_loss: Piece | None = None
    penalty_target: float | None = None
    group_size: int = 8
    epochs: int = 1
    dynamic_sampling: bool = False
    overlong_penalty: bool = False
    neighbours: tuple[str, ...] = ()

    @property
    def critic(self) -> bool:
        """Whether the algorithm trains a value model."""
        return self.value_loss is not None


ALGORITHMS: dict[str, Algorithm] = {
    "reinforce": Algorithm(
        title="The policy gradient: make what was rewarded more likely",
        equation="∇J = 1/N Σ_i Σ_t ∇log π(a_t|s_t) · R_i",
        reference="Williams, 1992",
        advantage={"name": "return"},
        loss={"name": "naive"},
        weights={"name": "sequence_sum"},
        group_size=1,
        neighbours=("reinforce_baseline", "rloo"),
    ),
    "reinforce_baseline": Algorithm(
        title="REINFORCE minus a running mean of earlier rewards",
        equation="∇J = 1/N Σ_i Σ_t ∇log π(a_t|s_t) · (R_i − b)\nb ← 0.9 b + 0.1 mean(R)",
        reference="Williams, 1992",
        advantage={"name": "moving_baseline"},
        loss={"name": "naive"},
        weights={"name": "sequence_sum"},
        group_size=1,
        neighbours=("reinforce", "rloo", "reinforce_pp"),
    ),
    "rloo": Algorithm(
        title="REINFORCE against the mean of the other completions of the same prompt",
        equation="∇J = 1/N Σ_i Σ_t ∇log π(a_t|s_t) · (R_i − 1/(G−1) Σ_{j≠i} R_j)",
        reference="Ahmadian et al., 2024, arXiv:2402.14740",
        advantage={"name": "leave_one_out"},
        loss={"name": "naive"},
        weights={"name": "sequence_sum"},
        kl=KL(placement="reward", coefficient=0.05, estimator="k1"),
        group_size=4,
        neighbours=("reinforce_baseline", "dr_grpo", "grpo"),
    ),
    "remax": Algorithm(
        title="REINFORCE against the greedy completion of the same prompt",
        equation="∇J = 1/N Σ_i Σ_t ∇log π(a_t|s_t) · (R_i − R(greedy_i))",
        reference="Li et al., 2023, arXiv:2310.10505",
        advantage={"name": "greedy_baseline"},
        loss={"name": "naive"},
        weights={"name": "sequence_sum"},
        kl=KL(placement="reward", coefficient=0.05, estimator="k1"),
        group_size=1,
        neighbours=("reinforce_baseline", "rloo"),
    ),
    "pkpo": Algorithm(
        title="REINFORCE for the best of k completions instead of the average one",
        equation="∇J = 1/N Σ_i Σ_t ∇log π(a_t|s_t) · A_i\n"
        "A_i = k (mean of max R over sets of k with i − over sets of k without i)",
        reference="Walder and Karkhanis, 2025, arXiv:2505.15201",
        advantage={"name": "pass_at_k", "k": 4},
        loss={"name": "naive"},
        weights={"name": "sequence_sum"},
        neighbours=("rloo", "dr_grpo"),
    ),
    "reinforce_pp": Algorithm(
        title="PPO's clip without a critic: returns whitened over the whole batch",
        equation="J = mean_t min(ρ_t A_t, clip(ρ_t) A_t)\nA = (R_t − mean_batch) / std_batch",
        reference="Hu, 2025, arXiv:2501.03262",
        advantage={"name": "batch_whitened"},
        loss={"name": "clipped"},
        weights={"name": "token_mean"},
        kl=KL(placement="reward", coefficient=0.01, estimator="k1"),
        group_size=1,
        neighbours=("ppo", "reinforce_baseline", "grpo"),
    ),
    "ppo": Algorithm(
        title="Clipped ratios, and a critic that gives every token its own advantage",
        equation="J = mean_t min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t) − c_V ½ (V_t − R_t)²\n"
        "A = GAE(γ, λ)",
        reference="Schulman et al., 2017, arXiv:1707.06347",
        advantage={"name": "gae"},
        loss={"name": "clipped"},
        weights={"name": "token_mean"},
        kl=KL(placement="reward", coefficient=0.05, estimator="k1"),
        value_loss={"name": "clipped"},
        group_size=1,
        epochs=4,
        neighbours=("ppo_penalty", "grpo", "reinforce_pp"),
    ),
    "ppo_penalty": Algorithm(
        title="PPO with a KL penalty to the old policy in place of the clip",
        equation="J = mean_t ρ_t A_t − β KL(π_old ‖ π) − c_V ½ (V_t − R_t)²\n"
        "β doubles or halves towards a target KL",
        reference="Schulman et al., 2017, arXiv:1707.06347, §4",
        advantage={"name": "gae"},
        loss={"name": "penalised"},
        weights={"name": "token_mean"},
        kl=KL(placement="reward", coefficient=0.05, estimator="k1"),
        value_loss={"name": "clipped"},
        penalty_target=0.01,
        group_size=1,
        epochs=4,
        neighbours=("ppo",),
    ),
    "grpo": Algorithm(
        title="PPO's clip, with the group of completions in place of the critic",
        equation="J = 1/N Σ_i 1/|o_i| Σ_t min(ρ_t A_i, clip(ρ_t, 1−ε, 1+ε) A_i) − β KL(π ‖ π_ref)\n"
        "A_i = (R_i − mean) / std, over the group",
        reference="Shao et al., 2024, arXiv:2402.03300",
        advantage={"name": "group_normalised"},
        loss={"name": "clipped"},
        weights={"name": "sequence_mean"},
        kl=KL(placement="loss", coefficient=0.04),
        neighbours=("dr_grpo", "dapo", "turn_grpo", "ppo"),
    ),
    "turn_grpo": Algorithm(
        title="GRPO of turns: each turn of an episode is compared with the same turn of others",
        equation="J = 1/N Σ_i 1/|o_i| Σ_k Σ_{t in turn k} min(ρ_t A_{i,k}, clip(ρ_t) A_{i,k})\n"
        "A_{i,k} = (R_{i,k} − mean) / std, over the group;   R_{i,k} = Σ_{l ≥ k} γ^(l−k) r_{i,l}",
        reference="after MT-GRPO; Zeng et al., 2025, arXiv:2505.11821",
        advantage={"name": "turn_group_normalised"},
        loss={"name": "clipped"},
        weights={"name": "sequence_mean"},
        neighbours=("grpo", "ppo"),
    ),
    "dr_grpo": Algorithm(
        title="GRPO without its two biases: no division by the deviation, none by the length",
        equation="J = 1/(N·L) Σ_i Σ_t min(ρ_t A_i, clip(ρ_t) A_i)\n"
        "A_i = R_i − mean, over the group;   L is the generation limit",
        reference="Liu et al., 2025, arXiv:2503.20783",
        advantage={"name": "group_centred"},
        loss={"name": "clipped"},
        weights={"name": "sequence_sum", "length": "max_new_tokens"},
        neighbours=("grpo", "rloo"),
    ),
    "dapo": Algorithm(
        title="GRPO by tokens, with room upwards, and only groups that teach",
        equation="J = 1/Σ|o_i| Σ_i Σ_t min(ρ_t A_i, clip(ρ_t, 1−ε_low, 1+ε_high) A_i)",
        reference="Yu et al., 2025, arXiv:2503.14476",
        advantage={"name": "group_normalised"},
        loss={"name": "clipped", "clip_high": 0.28},
        weights={"name": "token_mean"},
        dynamic_sampling=True,
        overlong_penalty=True,
        neighbours=("grpo", "cispo"),
    ),
    "gspo": Algorithm(
        title="GRPO with one ratio for the whole sequence",
        equation="J = 1/N Σ_i min(s_i A_i, clip(s_i) A_i)\ns_i = exp(1/|o_i| Σ_t log ρ_t)",
        reference="Zheng et al., 2025, arXiv:2507.18071",
        advantage={"name": "group_normalised"},
        loss={"name": "sequence_clipped"},
        weights={"name": "sequence_mean"},
        neighbours=("grpo", "sapo", "gmpo"),
    ),
    "gmpo": Algorithm(
        title="GRPO with the geometric mean of the sequence's clipped ratios",
        equation="J = 1/N Σ_i A_i · exp(1/|o_i| Σ_t l_t)\n"
        "l_t = min(log ρ_t, ε_high) if A_i > 0, max(log ρ_t, −ε_low) if A_i < 0",
        reference="Zhao et al., 2025, arXiv:2507.20673",
        advantage={"name": "group_normalised"},
        loss={"name": "geometric_mean"},
        weights={"name": "sequence_mean"},
        neighbours=("gspo", "grpo"),
    ),
    "cispo": Algorithm(
        title="Clip the importance weight, so that no token loses its gradient",
        equation="J = 1/Σ|o_i| Σ_i Σ_t sg(min(ρ_t, 1+ε_high)) A_i log π(a_t|s_t)",
        reference="MiniMax, 2025, arXiv:2506.13585",
        advantage={"name": "group_normalised"},
        loss={"name": "cispo"},
        weights={"name": "token_mean"},
        neighbours=("dapo", "grpo"),
    ),
    "sapo": Algorithm(
        title="A soft gate that fades tokens out instead of cutting them off",
        equation="J = 1/N Σ_i 1/|o_i| Σ_t (4/τ) σ(τ (ρ_t − 1)) A_i\nτ by the sign of A_i",
        reference="Gao et al., 2025, arXiv:2511.20347",
        advantage={"name": "group_normalised"},
        loss={"name": "sapo"},
        weights={"name": "sequence_mean"},
        neighbours=("grpo", "gspo"),
    ),
    "clip_cov": Algorithm(
        title="GRPO by tokens that drops a few tokens whose covariance eats the entropy",
        equation="J = 1/Σ|o_i| Σ_i Σ_t min(ρ_t A_i, clip(ρ_t) A_i), 0 for tokens drawn by cov_t\n"
        "cov_t = (A_t − mean A) · (log π_old,t − mean log π_old)",
        reference="Cui et al., 2025, arXiv:2505.22617",
        advantage={"name": "group_normalised"},
        loss={"name": "clip_cov"},
        weights={"name": "token_mean"},
        neighbours=("kl_cov", "dapo"),
    ),
    "kl_cov": Algorithm(
        title="Importance sampling that holds back the tokens whose covariance eats the entropy",
        equation="J = 1/Σ|o_i| Σ_i Σ_t (ρ_t A_i − β |log ρ_t| for the tokens of highest cov_t)\n"
        "cov_t = (A_t − mean A) · (log π_old,t − mean log π_old)",
        reference="Cui et al., 2025, arXiv:2505.22617",
        advantage={"name": "group_normalised"},
        loss={"name": "kl_cov"},
        weights={"name": "token_mean"},
        epochs=2,  # in the first optimiser step of a batch ρ is 1, and the loss restrains nothing
        neighbours=("clip_cov", "grpo"),
    ),
    "distill": Algorithm(
        title="On-policy distillation: a teacher scores every token that the policy sampled",
        equation="J = 1/Σ|o_i| Σ_i Σ_t ρ_t A_t\n"
        "A_t = log π_teacher(a_t|s_t) − log π_old(a_t|s_t), whose mean is −KL(π ‖ π_teacher)",
        reference="Thinking Machines, 2025; after Gu et al., 2023, arXiv:2306.08543",
        advantage={"name": "towards_teacher"},
        loss={"name": "unclipped"},
        weights={"name": "token_mean"},
        group_size=1,
        neighbours=("gkd", "reinforce"),
    ),
    "gkd": Algorithm(
        title="On-policy distillation by the exact divergence of the whole vocabulary",
        equation="J = −1/Σ|o_i| Σ_i Σ_t D_β(π_teacher(·|s_t), π(·|s_t))\n"
        "reverse KL at β = 1, forward KL at β = 0, Jensen–Shannon between",
        reference="Agarwal et al., 2023, arXiv:2306.13649",
        advantage={"name": "return"},
        loss={"name": "teacher_divergence"},
        weights={"name": "token_mean"},
        group_size=1,
        neighbours=("distill", "grpo"),
    ),
}


# What others call a row where no letters tell.
_SPELLED = {"reinforce++": "reinforce_pp", "gae": "ppo"}


def algorithm(name: str) -> Algorithm:
    """The row ``name``.

    >>> algorithm("grpo").advantage["name"]
    'group_normalised'
    """
    if name not in ALGORITHMS:
        near = did_you_mean(_SPELLED.get(name.casefold(), name), ALGORITHMS)
        raise ValueError(f"algorithm: unknown name {name!r}; {near}")
    return ALGORITHMS[name]


def kinds_of(name: str) -> list[PieceKind]:
    """The kinds of pieces that have this name; none where only an algorithm has it.

    >>> kinds_of("clipped")
    ['policy loss', 'value loss']
    """
    kinds = [kind for kind in _TABLES if name in piece_table(kind)]
    if not kinds and name not in ALGORITHMS:
        known = {*ALGORITHMS, "kl", *(piece for kind in _TABLES for piece in piece_table(kind))}
        raise ValueError(f"explain: unknown name {name!r}; {did_you_mean(name, known)}")
    return kinds


def pieces(name: str) -> dict[str, str]:
    """A row as text: every piece with all its options, ready to print or compare.

    >>> pieces("dapo")["policy loss"]
    'clipped(clip_low=0.2, clip_high=0.28)'
    """
    row = algorithm(name)
    kl = row.kl
    reference = f"{kl.estimator} in the {kl.placement}, β = {kl.coefficient:g}"
    return {
        "advantage": _piece(row.advantage, piece_table("advantage")),
        "policy loss": _piece(row.loss, piece_table("policy loss")),
        "averaging": _piece(row.weights, piece_table("averaging")),
        "critic": _piece(row.value_loss, piece_table("value loss")) if row.value_loss else "none",
        "KL to reference": "none" if kl.placement == "none" else reference,
        "completions per prompt": str(row.group_size),
        "epochs per batch": str(row.epochs),
        "dynamic sampling": "yes" if row.dynamic_sampling else "no",
        "overlong penalty": "yes" if row.overlong_penalty else "no",
    }


def piece_table(kind: PieceKind) -> Mapping[str, Function]:
    """The pieces of a kind by name, without loading torch.

    >>> sorted(piece_table("value loss"))
    ['clipped', 'huber', 'squared']
    """
    return written_table(*_TABLES[kind])


def real_piece(name: str, kind: PieceKind) -> Function:
    """A piece itself, with its docstring; loads torch."""
    return real(piece_table(kind)[name])


def difference(first: str, second: str) -> dict[str, tuple[str, str]]:
    """The pieces in which two rows differ.

    >>> sorted(difference("grpo", "gspo"))
    ['KL to reference', 'policy loss']
    """
    one, other = pieces(first), pieces(second)
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def _piece(piece: Piece, table: Mapping[str, Any]) -> str:
    name, given = split(piece, kind="piece")
    known = options(look_up(name, table, kind="piece"))
    text = ", ".join(f"{key}={given.get(key, known[key].default)}" for key in known)
    return f"{name}({text})" if text else name
