"""What a run refuses or says before anything is trained, however late it would matter."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console

from posttrain.build.parts import Parts, check_room
from posttrain.build.preference_stages import check_early
from posttrain.build.scoring import make_scorer
from posttrain.build.texts import look_at_data
from posttrain.build.trained_rows import check_has_test
from posttrain.config import Resolved
from posttrain.config.pieces import MODEL_REWARD
from posttrain.models.load import Policy
from posttrain.rewards.scorer import RewardScorer


def look_ahead(
    recipe: Resolved, policy: Policy, *, parts: Parts, coming: Collection[str], console: Console
) -> None:
    """Raise what a stage would only find when it comes; ``coming`` are those not done yet."""
    check_early(recipe, policy)
    check_room(recipe, parts, policy=policy)
    check_ready(recipe, parts, stages=coming)
    if "eval" in recipe.stages and parts.task is not None:
        check_has_test(parts.task, recipe.task)
    look_at_data(recipe, parts, stages=coming, console=console)


def check_ready(recipe: Resolved, parts: Parts, *, stages: Collection[str]) -> None:
    """Raise where what a reward of these stages needs (a server, say) is not there."""
    if isinstance(parts.scorer, RewardScorer) and {"rl", "eval"} & {*stages}:
        parts.scorer.check_ready()
    given = recipe.prefer.rewards if "prefer" in stages else {}
    functions = {name: options for name, options in given.items() if name != MODEL_REWARD}
    if functions:
        annotator = make_scorer(functions, parts.template, device=parts.device)
        try:
            annotator.check_ready()
        except ValueError as error:
            raise ValueError(f"prefer.{error}") from None
