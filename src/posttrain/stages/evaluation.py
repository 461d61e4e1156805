"""Accuracy on held-out problems: measured, judged and written down, within a stage or alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.build.rendered_prompts import rendered_prompts
from posttrain.build.sampler import make_plain_sampler, until_done
from posttrain.build.scoring import check_invalid
from posttrain.build.setup import Setup
from posttrain.config import EvalSection, Resolved
from posttrain.pipelines.evaluate import Evaluation, evaluate
from posttrain.protocols import Engine, Learner
from posttrain.rollout.collect import collect, collect_scored
from posttrain.runs import config_digest, replacing
from posttrain.runs.rollouts import turn_rows
from posttrain.track.encoding import encode_json
from posttrain.track.progress import phase
from posttrain.types import Prompt, Rollout, Sampling


def answers(
    setup: Setup,
    prompts: Sequence[str],
    *,
    engine: Engine | None = None,
    learner: Learner | None = None,
    max_new_tokens: int = 256,
    num_samples: int = 1,
    seed: int = 0,
    **drawing: Any,
) -> list[Rollout]:
    """What a policy answers to these prompts, with the weights that a learner has now."""
    asked = [Prompt(id=f"asked-{number}", text=text) for number, text in enumerate(prompts)]
    asked = [replace(prompt, tokens=setup.template.render(prompt).tokens) for prompt in asked]
    sampler = engine or make_plain_sampler(setup)
    drawing = {"temperature": 0.0, **drawing, "stop": tuple(drawing.get("stop", ()))}
    sampling = Sampling(max_new_tokens=max_new_tokens, **drawing)
    with until_done(sampler, given=engine):
        if learner is not None:
            sampler.sync(learner)(learner.version)
        return collect(sampler, asked, sampling=sampling, num_samples=num_samples, seed=seed)


def evaluate_policy(
    setup: Setup, section: EvalSection, *, engine: Engine | None = None, doing: str = "evaluating"
) -> Evaluation:
    """Accuracy of a policy on the task's test problems; ``doing`` is what a display calls it.

    ``engine`` is one that is open, and stays so.
    """
    scorer, rl = setup.graded, setup.recipe.for_evaluations
    sampler = engine or make_plain_sampler(setup)
    longest, limit = section.max_new_tokens, section.problems
    prompts = rendered_prompts(setup, "test", max_new_tokens=longest, limit=limit)
    num_answers = len(prompts) * (1 + section.samples)
    with until_done(sampler, given=engine), phase(doing, total=num_answers, unit="answers"):
        return evaluate(
            partial(collect_scored, engine=sampler, scorer=scorer, env=setup.env),
            prompts,
            marks=setup.marks,
            sampling=Sampling(
                max_new_tokens=longest,
                temperature=section.temperature,
                stop=rl.stop if rl is not None else (),
            ),
            samples=section.samples,
            seed=setup.recipe.run.seed,
        )


def evaluate_into(path: Path, setup: Setup, *, doing: str = "evaluating") -> dict[str, Any]:
    """The evaluation that ``[eval]`` asks for as plain values; its problems go to a file.

    ``of`` names what was asked: two evaluations are compared only where it is the same. What checks
    answers is part of it: right by one reward is not right by another.
    """
    found = evaluate_policy(setup, setup.recipe.eval, engine=setup.engine, doing=doing)
    told, problems = evaluated(found)
    asked_of = setup.task.prompts("test") if setup.task is not None else ()
    places = {prompt.id: number for number, prompt in enumerate(asked_of)}
    write_problems(path, ({**row, "index": places[row["id"]]} for row in problems))
    check_held_out(found, setup.recipe)
    return {**told, "of": asked(setup)}


def asked(setup: Setup) -> str:
    """What an evaluation asks, in one word."""
    section = setup.recipe.eval.model_dump(mode="json")
    return config_digest(section, {"by": setup.marks.check})


def check_held_out(found: Evaluation, recipe: Resolved) -> None:
    """Stop a run whose graders break on held-out problems, as :func:`check_invalid` on others.

    In the accuracy a broken score is not a right one: too many would pass for a bad model. A run
    without ``[rl]`` has no limit, and shows the share.
    """
    rl = recipe.for_evaluations
    if rl is not None:
        check_invalid(found.rollouts, rl.max_invalid, of=" of held-out problems")


def evaluated(found: Evaluation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An evaluation as plain values: its numbers, and one row a problem."""
    counts: dict[int, list[bool | None]] = {}
    for rollout in found.sampled:
        counts.setdefault(rollout.group, []).append(found.is_right(rollout))
    rows = [
        _problem(rollout, right=found.is_right(rollout)) | _sampled(counts.get(rollout.group, []))
        for rollout in found.greedy
    ]
    numbers = {
        "estimates": {name: vars(estimate) for name, estimate in found.estimates.items()},
        "problems": len(found.greedy),
        "above_one": dict(found.above_one),
        "reward": found.mean_reward,
        "parts": dict(found.parts),
        "invalid": found.invalid,
        "reason": found.reason,
    }
    return numbers, rows


def write_problems(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of an evaluation, one line a problem."""
    with replacing(path) as beside, beside.open("wb") as file:
        file.writelines(encode_json(row) + b"\n" for row in rows)


def _problem(rollout: Rollout, *, right: bool | None) -> dict[str, Any]:
    score = rollout.score
    assert score is not None, "evaluate scores every rollout"
    asked = rollout.prompt
    answer = asked.columns.get("answer")
    turns = turn_rows(rollout)
    return {
        "id": asked.id,
        "prompt": asked.shown,
        **({"messages": asked.messages} if len(asked.messages) > 1 and not asked.text else {}),
        "answer": None if answer is None else str(answer),
        "completion": rollout.text,
        "correct": right,
        "reward": score.value,
        "parts": dict(score.parts),
        "state": score.state,
        "reason": score.reason,
        "stop_reason": rollout.stop_reason,
        "num_tokens": len(rollout.tokens),
        **({"turns": turns} if turns else {}),
    }


def _sampled(right: list[bool | None]) -> dict[str, Any]:
    """Of how many samples how many are right, where something checks them."""
    if not right:
        return {}
    known = [verdict for verdict in right if verdict is not None]
    return {"samples": len(right)} | ({"samples_correct": sum(known)} if known else {})
