"""``[cluster]``: what it takes, and what of it has no effect without the rest."""

import re
import tomllib
from typing import Any

import pytest

from posttrain.config import recipe_from_dict, resolve, to_toml
from posttrain.config.resolved import Resolved


def resolved(**cluster: Any) -> Resolved:
    return resolve(recipe_from_dict({"task": "sort", "eval": {}, "cluster": cluster}))


def test_a_recipe_without_the_section_has_none() -> None:
    recipe = resolve(recipe_from_dict({"task": "sort", "eval": {}}))
    assert recipe.cluster is None
    assert "[cluster]" not in to_toml(recipe)


def test_what_is_written_is_shown_and_read_back() -> None:
    recipe = resolved(address="local", learners=2, engines=1, cpus_per_engine=0.5)
    assert recipe.cluster is not None
    assert (recipe.cluster.learners, recipe.cluster.engines) == (2, 1)
    assert recipe.cluster.gpus_per_learner is None  # known once the cluster is
    text = to_toml(recipe)
    assert "[cluster]\nlearners = 2\nengines = 1\n" in text


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"address": "local", "colocate": True}, "cluster.colocate: no effect without replicas"),
        (
            {"address": "local", "engine": "vllm", "gpus_per_engine": 1.0},
            "cluster.engine, cluster.gpus_per_engine: no effect without replicas; drop them",
        ),
        ({"deadline": 5.0}, "cluster.deadline: no effect without cluster.address; set it"),
        ({"learners": 0}, "cluster.learners"),
        ({"address": ""}, "cluster.address"),
        ({"engine": "sglang"}, "cluster.engine"),
        ({"ranks": 2}, "cluster.ranks: unknown key"),
    ],
)
def test_what_means_nothing_is_refused(cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolved(**cluster)


def test_the_engine_of_the_cluster_is_the_default_of_that_of_rl() -> None:
    given: dict[str, Any] = {"task": "sort", "rl": {"steps": 1}}
    replicas = {"address": "local", "engines": 1}
    chosen = resolve(recipe_from_dict({**given, "cluster": {**replicas, "engine": "vllm"}}))
    assert chosen.rl.engine is not None
    assert chosen.rl.engine["name"] == "vllm"
    assert resolve(recipe_from_dict(tomllib.loads(to_toml(chosen)))).rl.engine == chosen.rl.engine
    given["rl"]["engine"] = {"deadline": 5.0}  # options alone
    chosen = resolve(recipe_from_dict({**given, "cluster": {**replicas, "engine": "vllm"}}))
    assert chosen.rl.engine is not None
    assert (chosen.rl.engine["name"], chosen.rl.engine["deadline"]) == ("vllm", 5.0)
    given["rl"]["engine"] = "vllm"  # the cluster's is not given, and does not contradict it
    chosen = resolve(recipe_from_dict({**given, "cluster": replicas}))
    assert resolve(recipe_from_dict(tomllib.loads(to_toml(chosen)))).rl.engine == chosen.rl.engine
