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
``choices``      the words that name them, and the gradient that each estimator has
``preferences``  how good a reward model is
``diagnostics``  numbers that tell how an update went
``ops``          masked and group statistics, log-probs, the one shift
``turns``        statistics of the turns that an episode has
``pieces``       how a piece says what it is and needs
``table``        the algorithms: rows of pieces and defaults
===============  ==================================================================================

The tables ``ADVANTAGES``, ``POLICY_LOSSES``, ``VALUE_LOSSES``, ``PREFERENCE_LOSSES``,
``DIRECT_LOSSES``, ``WEIGHTS``, ``CORRECTIONS`` and ``ALGORITHMS`` name what a recipe can choose.
``Batch`` carries the tensors:

>>> from posttrain.algorithms import Batch, group_centred
>>> group_centred(Batch.from_rewards([3.0, 1.0])).advantages.T
tensor([[ 1., -1.]], dtype=torch.float64)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.algorithms.advantages import (
        ADVANTAGES,
        batch_whitened,
        constant_baseline,
        gae,
        greedy_baseline,
        group_centred,
        group_normalised,
        leave_one_out,
        leave_one_out_normalised,
        max_only,
        moving_baseline,
        optimal_baseline,
        pass_at_k,
        per_token,
        plain_return,
        return_to_go,
        sequence_returns,
        towards_teacher,
        turn_group_normalised,
        turn_return_to_go,
        update_baseline,
        without_siblings,
    )
    from posttrain.algorithms.choices import GRADIENTS
    from posttrain.algorithms.corrections import CORRECTIONS, masked, truncated
    from posttrain.algorithms.diagnostics import (
        Tally,
        ratio_terms,
        share_without_signal,
        tally,
        value_terms,
    )
    from posttrain.algorithms.kl import Coefficient, estimate, exact, jensen_shannon
    from posttrain.algorithms.losses import (
        DIRECT_LOSSES,
        POLICY_LOSSES,
        PREFERENCE_LOSSES,
        VALUE_LOSSES,
        bradley_terry,
        cispo,
        clip_cov,
        clipped,
        clipped_value,
        dpo,
        dual_clip,
        geometric_mean,
        huber,
        ipo,
        kl_cov,
        kto,
        naive,
        nll,
        orpo,
        penalised,
        plackett_luce,
        sapo,
        sequence_clipped,
        simpo,
        squared,
        teacher_divergence,
        unclipped,
    )
    from posttrain.algorithms.objective import (
        with_correction,
        with_entropy,
        with_kl,
        with_mismatch,
        with_values,
    )
    from posttrain.algorithms.ops import (
        compact,
        entropy,
        gather_logprobs,
        group_centre,
        group_count,
        group_deviation,
        group_index,
        group_max,
        group_sum,
        keep,
        log_softmax,
        masked_centre,
        masked_mean,
        masked_variance,
        noise_floor,
        others_deviation,
        shift,
        token_logprobs,
        whiten,
        window_sum,
    )
    from posttrain.algorithms.pieces import (
        Facts,
        asks_teacher,
        centred_over,
        divergence_of,
        facts,
        for_batch,
        needed,
        piece,
        smallest_group,
    )
    from posttrain.algorithms.preferences import (
        Bin,
        accuracy,
        calibration,
        calibration_error,
        length_correlation,
        pair_calibration,
    )
    from posttrain.algorithms.shaping import (
        kl_in_reward,
        last,
        missing_end,
        overlong,
        score_at_last_token,
        whiten_rewards,
    )
    from posttrain.algorithms.table import (
        ALGORITHMS,
        CORRECTION,
        KL,
        VALUE_LOSS,
        Algorithm,
        algorithm,
        difference,
    )
    from posttrain.algorithms.turns import turn_ends, turn_index, turn_sum
    from posttrain.algorithms.weights import WEIGHTS, sequence_mean, sequence_sum, token_mean, total
    from posttrain.types import Batch, Terms

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "Algorithm",
    "Batch",
    "Bin",
    "CORRECTION",
    "CORRECTIONS",
    "Coefficient",
    "DIRECT_LOSSES",
    "Facts",
    "GRADIENTS",
    "KL",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "Tally",
    "Terms",
    "VALUE_LOSS",
    "VALUE_LOSSES",
    "WEIGHTS",
    "accuracy",
    "algorithm",
    "asks_teacher",
    "batch_whitened",
    "bradley_terry",
    "calibration",
    "calibration_error",
    "centred_over",
    "cispo",
    "clip_cov",
    "clipped",
    "clipped_value",
    "compact",
    "constant_baseline",
    "difference",
    "divergence_of",
    "dpo",
    "dual_clip",
    "entropy",
    "estimate",
    "exact",
    "facts",
    "for_batch",
    "gae",
    "gather_logprobs",
    "geometric_mean",
    "greedy_baseline",
    "group_centre",
    "group_centred",
    "group_count",
    "group_deviation",
    "group_index",
    "group_max",
    "group_normalised",
    "group_sum",
    "huber",
    "ipo",
    "jensen_shannon",
    "keep",
    "kl_cov",
    "kl_in_reward",
    "kto",
    "last",
    "leave_one_out",
    "leave_one_out_normalised",
    "length_correlation",
    "log_softmax",
    "masked",
    "masked_centre",
    "masked_mean",
    "masked_variance",
    "max_only",
    "missing_end",
    "moving_baseline",
    "naive",
    "needed",
    "nll",
    "noise_floor",
    "optimal_baseline",
    "orpo",
    "others_deviation",
    "overlong",
    "pair_calibration",
    "pass_at_k",
    "penalised",
    "per_token",
    "piece",
    "plackett_luce",
    "plain_return",
    "ratio_terms",
    "return_to_go",
    "sapo",
    "score_at_last_token",
    "sequence_clipped",
    "sequence_mean",
    "sequence_returns",
    "sequence_sum",
    "share_without_signal",
    "shift",
    "simpo",
    "smallest_group",
    "squared",
    "tally",
    "teacher_divergence",
    "token_logprobs",
    "token_mean",
    "total",
    "towards_teacher",
    "truncated",
    "turn_ends",
    "turn_group_normalised",
    "turn_index",
    "turn_return_to_go",
    "turn_sum",
    "unclipped",
    "update_baseline",
    "value_terms",
    "whiten",
    "whiten_rewards",
    "window_sum",
    "with_correction",
    "with_entropy",
    "with_kl",
    "with_mismatch",
    "with_values",
    "without_siblings",
]

_TOPICS = (
    *("advantages", "losses", "weights", "objective", "shaping", "corrections", "kl"),
    *("preferences", "diagnostics", "ops", "turns", "pieces", "table", "choices"),
)


def __getattr__(name: str) -> Any:
    """Import a topic when it, or a name in it, is first used."""
    if name in _TOPICS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        for home in _TOPICS:
            found = vars(importlib.import_module(f"{__name__}.{home}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_TOPICS])
