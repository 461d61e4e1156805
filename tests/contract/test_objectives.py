"""What every objective keeps: it pickles, and says the same of a batch on the other side."""

import pickle
from typing import Any

import pytest
import torch
from algorithms.batches import moved, ready
from small_runs import taught
from torch import Tensor

from posttrain.algorithms.table import ALGORITHMS
from posttrain.build.algorithm import make_plan
from posttrain.config import recipe_from_dict, resolve
from posttrain.pipelines.plan import State, make_objective
from posttrain.protocols import Outputs
from posttrain.types import Batch, Terms

# An entropy bonus and a correction are added to the loss of each algorithm.
EXTRA: dict[str, Any] = {"entropy_coefficient": 0.1, "top_p": 0.9}


def said(terms: Terms) -> dict[str, Tensor]:
    named = {"parts": terms.parts, "means": terms.means, "maxima": terms.maxima}
    found = {f"{kind}/{name}": t for kind, of in named.items() for name, t in of.items()}
    return {"loss": terms.loss, **found}


def outputs(batch: Batch) -> Outputs:
    logprobs = moved(batch).requires_grad_()
    return Outputs(
        logprobs=logprobs,
        entropy=-logprobs,
        values=moved(batch, seed=1),
        divergence=logprobs.square(),
    )


WARMED_UP = [name for name, row in ALGORITHMS.items() if row.critic]


@pytest.mark.parametrize(
    ("name", "warming_up"), [*((n, False) for n in ALGORITHMS), *((n, True) for n in WARMED_UP)]
)
def test_an_objective_says_the_same_after_a_round_trip(name: str, warming_up: bool) -> None:
    rl = {"algorithm": name, **EXTRA}
    if warming_up:
        rl["critic"] = {"warmup_steps": 1}
    plan = make_plan(resolve(recipe_from_dict({"rl": rl, "task": "sort", **taught(name)})).rl)
    state = State(kl=plan.kl, penalty=plan.penalty)
    batch = ready()
    assert plan.correction is not None
    batch = plan.weights(plan.correction(batch))
    numbers = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    objective = make_objective(plan, state, batch=batch)
    again = pickle.loads(pickle.dumps(objective))
    assert again.only_critic == objective.only_critic == warming_up
    assert (objective.divergence is not None) == (name == "gkd")
    if objective.divergence is not None and again.divergence is not None:
        both = [each.divergence(numbers, numbers.flip(1)) for each in (objective, again)]
        assert torch.equal(*both)
    first, second = outputs(batch), outputs(batch)
    here, there = said(objective(first, batch)), said(again(second, batch))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[each], there[each]) for each in here)
    assert bool(here["loss"].any())
    if not warming_up:
        gradients = [
            torch.autograd.grad(terms["loss"].sum(), given.need("logprobs"))[0]
            for terms, given in ((here, first), (there, second))
        ]
        assert torch.equal(*gradients)
        assert bool(gradients[0].any())
