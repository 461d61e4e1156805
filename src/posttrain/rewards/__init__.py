"""Rewards: functions that score a response. A wrong answer scores 0; one that cannot run raises.

A reward's positional parameters are data, taken by name from the rollout: ``prompt``,
``completion``, ``num_tokens``, ``stop_reason``, and the prompt's columns (``answer``, …). Its
keyword-only parameters are options. :class:`posttrain.rewards.scorer.RewardScorer` runs them.
"""

from posttrain.protocols import Reward
from posttrain.rewards.code import code_tests
from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import extract_answer
from posttrain.rewards.format import think_answer_format
from posttrain.rewards.judge import judge_verdict
from posttrain.rewards.math.answer import math_answer
from posttrain.rewards.numeric import exact_answer, numeric_answer, one_of_answers
from posttrain.rewards.penalties import length_penalty, overlong_penalty, repetition_penalty
from posttrain.rewards.puzzles import countdown_expression, melody_score, reasoning_gym_score
from posttrain.rewards.sorting import sorted_numbers

REWARDS: dict[str, Reward] = {
    "exact": exact_answer,
    "one_of": one_of_answers,
    "numeric": numeric_answer,
    "math": math_answer,
    "format": think_answer_format,
    "length": length_penalty,
    "overlong": overlong_penalty,
    "repetition": repetition_penalty,
    "judge": judge_verdict,
    "sort": sorted_numbers,
    "countdown": countdown_expression,
    "code": code_tests,
    "melody": melody_score,
    "reasoning_gym": reasoning_gym_score,
}

__all__ = [
    "REWARDS",
    "code_tests",
    "countdown_expression",
    "declare",
    "exact_answer",
    "extract_answer",
    "judge_verdict",
    "length_penalty",
    "math_answer",
    "melody_score",
    "numeric_answer",
    "overlong_penalty",
    "reasoning_gym_score",
    "repetition_penalty",
    "sorted_numbers",
    "think_answer_format",
]
