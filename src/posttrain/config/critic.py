"""Defaults of ``[rl.critic]``, and of the penalty that PPO may take in place of the clip."""

from __future__ import annotations

from posttrain.algorithms.table import VALUE_LOSS, Algorithm, piece_table
from posttrain.config.fields import Spec
from posttrain.config.pieces import complete
from posttrain.config.sections import CriticSection, RlSection
from posttrain.registry import look_up

CRITIC_RATE = 10  # a critic starts from nothing, and no policy falls over when it errs


def complete_critic(rl: RlSection, row: Algorithm) -> CriticSection:
    """The critic of a section, as it is written or by default, with nothing missing."""
    given = rl.critic or CriticSection()
    if given.kind == "shared" and given.source is not None:
        raise ValueError(
            "rl.critic.source: a shared critic is a head on the policy's trunk; drop it, or set "
            'rl.critic.kind to "separate"'
        )
    separate = given.kind == "separate"
    default = row.value_loss or VALUE_LOSS
    return given.model_copy(
        update={
            "source": given.source or ("policy" if separate else None),
            "learning_rate": given.learning_rate or _rate(rl.learning_rate),
            "loss": complete(
                given.loss, default, table=piece_table("value loss"), key="rl.critic.loss"
            ),
        }
    )


def _rate(rate: float) -> float:
    """``CRITIC_RATE × rate`` as one would write it: 10 × 1e-6 is 9.999999999999999e-06 in floats.

    >>> _rate(1e-6)
    1e-05
    """
    return float(f"{CRITIC_RATE * rate:.12g}")


def _is_steered(loss: Spec) -> bool:
    """Whether the loss says that its coefficient may follow a target; one without has none."""
    if "coefficient" not in loss:
        return False
    from posttrain.algorithms.pieces import facts

    return facts(look_up(loss["name"], piece_table("policy loss"), kind="rl.loss")).steered


def penalty(rl: RlSection, row: Algorithm) -> float | None:
    """The target of the penalty's coefficient, where the loss has one."""
    if not _is_steered(rl.loss):
        if rl.penalty_target is not None:
            raise ValueError(
                f"rl.penalty_target: the loss {rl.loss['name']!r} has no penalty; drop it, or set "
                "rl.loss to penalised (the algorithm ppo_penalty does)"
            )
        return None
    target = rl.penalty_target or row.penalty_target
    if target is not None and rl.loss.get("coefficient") == 0:
        raise ValueError(
            "rl.loss.coefficient: 0 stays 0 when it is doubled or halved towards "
            "rl.penalty_target; set it above 0"
        )
    return target
