"""Recipes: read, checked, resolved, and shown.

``read_recipe`` or ``recipe_from_dict`` gives what the user wrote; ``resolve`` fills in every
default and refuses what cannot be meant. All errors are a ``ValueError`` with text for the user.
"""

from posttrain.config.data_stages import Optimiser, RewardSection, SftSection
from posttrain.config.defaults import resolve
from posttrain.config.describe import ConfigError
from posttrain.config.quantities import (
    Quantity,
    arithmetic,
    changed_keys,
    render_dry_run,
    to_dict,
    to_toml,
)
from posttrain.config.read import read_recipe, recipe_from_dict
from posttrain.config.recipe_rules import cautions
from posttrain.config.reference import field_help
from posttrain.config.resolved import (
    CriticSection,
    DpoSection,
    EvalSection,
    KlSection,
    PreferSection,
    Resolved,
    RlSection,
)
from posttrain.config.sections import (
    ClusterSection,
    EnvironmentSection,
    GradingSection,
    ModelSection,
    Recipe,
)
from posttrain.config.specs import MODEL_REWARD

__all__ = [
    "ClusterSection",
    "ConfigError",
    "CriticSection",
    "DpoSection",
    "EvalSection",
    "EnvironmentSection",
    "GradingSection",
    "KlSection",
    "MODEL_REWARD",
    "ModelSection",
    "Optimiser",
    "PreferSection",
    "Quantity",
    "Recipe",
    "Resolved",
    "RewardSection",
    "RlSection",
    "SftSection",
    "arithmetic",
    "cautions",
    "changed_keys",
    "field_help",
    "read_recipe",
    "recipe_from_dict",
    "render_dry_run",
    "resolve",
    "to_dict",
    "to_toml",
]
