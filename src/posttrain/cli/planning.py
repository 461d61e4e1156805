"""The options of ``posttrain plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    context: typer.Context,
    *,
    learners: Annotated[
        int | None, typer.Option(min=1, help="Ranks that learn; else cluster.learners.")
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=0, help="Engines that sample; else cluster.engines.")
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Updates to run ahead; else rl.max_lag.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Take the costs from a run, not from a trial."),
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(min=1e-6, help="GB/s of weights from the learners to each engine.")
    ] = 1.25,
    learner_bandwidth: Annotated[
        float, typer.Option(min=1e-6, help="GB/s of each learner to the others.")
    ] = 1.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How fast a cluster would be that is not there yet: posttrain plan RECIPE.toml --learners 8.

    The costs of sampling and learning are measured here, or taken from a run; the queues of the
    cluster are simulated with them.
    """
    from posttrain.cli.cluster_plan import plan_recipe

    plan_recipe(
        context.args,
        run=measured,
        as_json=as_json,
        learners=learners,
        engines=engines,
        max_lag=max_lag,
        bandwidth=1e9 * bandwidth,
        learner_bandwidth=1e9 * learner_bandwidth,
    )
