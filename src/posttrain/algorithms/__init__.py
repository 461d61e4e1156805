"""The mathematics: tensors in, tensors out; importing it needs torch alone.

Every function is here by its own name, and by topic in the module that holds it:

===============  ==================================================================================
``advantages``   how much better than expected: ``(batch, *, options) -> batch`` with advantages
``losses``       of a policy, a critic, demonstrations, preferences: one term for each token or set
``weights``      how the terms are averaged, as data: the update is ``total(terms, batch)``
``objective``    what is added to a policy's loss: correction, KL, entropy bonus, critic
``shaping``      from one score a sequence to the rewards that the advantage sees
``corrections``  factors for a sampler that disagrees with the trainer
``kl``           divergence from the reference: estimators, the exact one, the rule of β
``preferences``  how good a reward model is
``diagnostics``  numbers that tell how an update went
``ops``          masked and group statistics, log-probs, the one shift
``declared``     how a piece says what it needs
``table``        the algorithms: rows of pieces and defaults
===============  ==================================================================================

The tables ``ADVANTAGES``, ``POLICY_LOSSES``, ``VALUE_LOSSES``, ``PREFERENCE_LOSSES``, ``WEIGHTS``,
``CORRECTIONS`` and ``ALGORITHMS`` name what a recipe can choose. ``Batch`` carries the tensors:

>>> from posttrain.algorithms import Batch, group_centred
>>> group_centred(Batch.from_rewards([3.0, 1.0])).advantages.T
tensor([[ 1., -1.]], dtype=torch.float64)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.algorithms.advantages import *  # noqa: F403
    from posttrain.algorithms.advantages.baselines import per_token as per_token
    from posttrain.algorithms.corrections import *  # noqa: F403
    from posttrain.algorithms.declared import *  # noqa: F403
    from posttrain.algorithms.diagnostics import *  # noqa: F403
    from posttrain.algorithms.kl import *  # noqa: F403
    from posttrain.algorithms.losses import *  # noqa: F403
    from posttrain.algorithms.objective import *  # noqa: F403
    from posttrain.algorithms.ops import *  # noqa: F403
    from posttrain.algorithms.preferences import *  # noqa: F403
    from posttrain.algorithms.shaping import *  # noqa: F403
    from posttrain.algorithms.table import *  # noqa: F403
    from posttrain.algorithms.weights import *  # noqa: F403
    from posttrain.types import Batch as Batch
    from posttrain.types import Terms as Terms

_TOPICS: dict[str, tuple[str, ...]] = {
    "advantages": (
        *("ADVANTAGES", "batch_whitened", "constant_baseline", "gae", "greedy_baseline"),
        *("group_centred", "group_normalised", "leave_one_out", "leave_one_out_normalised"),
        *("max_only", "moving_baseline", "optimal_baseline", "pass_at_k", "plain_return"),
        *("return_to_go", "sequence_returns", "update_baseline", "without_siblings"),
    ),
    "advantages.baselines": ("per_token",),
    "losses": (
        *("ADVANTAGE_LOSSES", "POLICY_LOSSES", "PREFERENCE_LOSSES", "VALUE_LOSSES"),
        *("bradley_terry", "cispo", "clipped", "clipped_value", "dpo", "dual_clip", "huber"),
        *("naive", "nll", "penalised", "plackett_luce", "sapo", "sequence_clipped", "squared"),
        "unclipped",
    ),
    "weights": ("WEIGHTS", "sequence_mean", "sequence_sum", "token_mean", "total"),
    "objective": ("with_correction", "with_entropy", "with_kl", "with_mismatch", "with_values"),
    "shaping": (
        *("kl_in_reward", "last", "missing_end", "overlong", "score_at_last_token"),
        "whiten_rewards",
    ),
    "corrections": ("CORRECTIONS", "masked", "truncated"),
    "kl": ("Coefficient", "estimate", "exact"),
    "preferences": (
        *("Bin", "accuracy", "calibration", "calibration_error", "length_correlation"),
        "pair_calibration",
    ),
    "diagnostics": ("Tally", "ratio_terms", "share_without_signal", "tally", "value_terms"),
    "ops": (
        *("compact", "entropy", "gather_logprobs", "group_centre", "group_count"),
        *("group_deviation", "group_index", "group_max", "group_sum", "keep", "log_softmax"),
        *("masked_centre", "masked_mean", "masked_variance", "noise_floor", "others_deviation"),
        *("shift", "token_logprobs", "whiten", "window_sum"),
    ),
    "declared": ("needs", "piece", "smallest_group"),
    "table": ("ALGORITHMS", "KL", "Algorithm", "algorithm", "difference", "pieces"),
}
_HOMES = {name: topic for topic, names in _TOPICS.items() for name in names}
_TYPES = ("Batch", "Terms")

__all__ = [*_TYPES, *_HOMES]  # noqa: PLE0604 - all are text


def __getattr__(name: str) -> Any:
    """A function loads its module when it is first asked for, and so does a topic."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _TYPES:
        return getattr(importlib.import_module("posttrain.types"), name)
    if name in _TOPICS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(topic for topic in _TOPICS if "." not in topic)})
