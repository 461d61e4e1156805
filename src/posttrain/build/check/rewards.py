"""Do the rewards work? What they take, whether they break, whether they tell answers apart."""

from __future__ import annotations

import statistics
from pathlib import Path

from posttrain.build.before import check_ready
from posttrain.build.check.answers import Answers
from posttrain.build.check.bench import Bench
from posttrain.build.check.report import Findings, State
from posttrain.build.parts import filled
from posttrain.models.reward_scorer import ModelScorer
from posttrain.rewards.scorer import RewardScorer

CODE_REWARD = "code"
SLOW_STEP = 60.0  # seconds of grading in a step that deserve a word


def check_grading(bench: Bench, answers: Answers, *, findings: Findings) -> None:
    """Time, failures, and the worth of right and wrong answers."""
    _check_time(bench, answers, findings=findings)
    scores = [r.score for r in answers.everything if r.score is not None]
    broken = [score for score in scores if not score.ok]
    share = len(broken) / max(1, len(scores))
    gold = answers.scored.get("gold", [])
    lost = sum(r.score is not None and not r.score.ok for r in gold) / max(1, len(gold))
    rl = bench.recipe.rl if "rl" in bench.recipe.stages else None
    allowed = rl.max_invalid if rl is not None else 0.0
    findings.judged(
        "broken scores",
        f"{share:.0%} of {len(scores)}" + (f"; the first: {broken[0].reason}" if broken else ""),
        # What breaks on answers that no model may ever give is left to the real rollouts.
        state="fail" if share == 1 or lost > allowed else "warn" if broken else "pass",
        fix="mend the reward: a score that breaks is left out, and too many stop the run",
    )
    if share < 1:
        with findings.excused(bench.excuse):
            _check_worth(answers, findings)


def _check_time(bench: Bench, answers: Answers, *, findings: Findings) -> None:
    seconds = [r.score.seconds for r in answers.everything if r.score is not None]
    if not seconds:
        return
    grading = bench.recipe.grading
    middle, most = statistics.median(seconds), max(seconds)
    text = f"{_time(middle)} each in the median of {len(seconds)} known answers, "
    text += f"{_time(most)} at most"
    state: State = "pass"
    if "rl" in bench.recipe.stages:
        rl = filled(bench.recipe.rl)
        step = middle * rl.prompts_per_step * rl.group_size / max(1, grading.workers)
        text += f": {_time(step)} a step by that median"
        state = "warn" if step > SLOW_STEP or most > grading.seconds / 2 else "pass"
    fix = "raise grading.workers, or make the reward faster; grading.seconds is the limit"
    findings.judged("grading time", text, state=state, fix=fix)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _check_worth(answers: Answers, findings: Findings) -> None:
    means = {kind: answers.mean(kind) for kind in ("gold", "wrong", "empty")}
    known = {kind: mean for kind, mean in means.items() if mean is not None}
    if not answers.claims:
        text = ", ".join(f"{kind} {mean:.2f}" for kind, mean in known.items())
        findings.passed("tells answers apart", f"not asked to, it judges the form: {text}")
        return
    if "gold" not in known or len(known) < 2:
        text = "cannot be said without gold answers; see the signal of real rollouts below"
        findings.passed("tells answers apart", text)
        return
    text = ", ".join(f"{kind} {mean:.2f}" for kind, mean in known.items())
    best = max(mean for kind, mean in known.items() if kind != "gold")
    if known["gold"] > best:
        findings.passed("tells answers apart", text)
    elif known["gold"] == best:
        findings.failed(
            "tells answers apart",
            f"no: on average {text}",
            fix="mend the reward: right and wrong must differ, or there is nothing to learn from",
        )
    else:
        findings.failed(
            "tells answers apart",
            f"the wrong way round: on average {text}",
            fix="turn the sign of a weight in [rewards], or mend the reward",
        )


def is_ready(bench: Bench, findings: Findings) -> bool:
    """Whether what the rewards need is there; a line only where it is not."""
    stages = ("rl",) if bench.under_way else bench.recipe.stages
    with findings.guard("ready"):
        check_ready(bench.recipe, bench.of_parts(), stages=stages)
        return True
    return False


def check_kinds(bench: Bench, findings: Findings) -> None:
    """What lies behind the rewards: a sandbox, or a model."""
    scorer = bench.of_parts().scorer
    functions = scorer.rewards if isinstance(scorer, RewardScorer) else ()
    if any(reward.name == CODE_REWARD for reward in functions):
        with findings.guard("sandbox"):
            _check_sandbox(bench, findings)
    if bench.stand_in:
        names = ", ".join(reward.name for reward in functions)
        findings.warned(
            "reward model",
            f"the stage reward is still to make it; here {names} stands in for it",
            fix="nothing to do; check a recipe of [rl] alone once the reward model is there",
        )
    for reward in functions:
        if isinstance(reward.function, ModelScorer):
            with findings.attempt("reward model"):
                _check_model(reward.function, findings)


def _check_sandbox(bench: Bench, findings: Findings) -> None:
    """Which sandbox is in force, and that it is one."""
    try:
        from posttrain.rewards.sandbox import available, choose
    except ImportError:
        findings.warned("sandbox", "there is none in this installation", fix="update posttrain")
        return
    task = bench.task
    own = dict(task.rewards).get(CODE_REWARD, {}) if task is not None else {}
    given = bench.recipe.rewards.get(CODE_REWARD) or (own if isinstance(own, dict) else {})
    asked = str(given.get("sandbox", "auto"))
    chosen = choose(asked)  # type: ignore[arg-type]
    isolates = {backend.name: backend.isolates for backend in available()}[chosen]
    findings.judged(
        "sandbox",
        f"{chosen}: isolates {isolates}",
        state="warn" if chosen == "none" else "pass",
        fix='install bubblewrap and set the option sandbox of the reward "code" to "auto"',
    )


def _check_model(scorer: ModelScorer, findings: Findings) -> None:
    reward = scorer.reward
    size = sum(weight.numel() for weight in reward.model.parameters())
    findings.passed("reward model", f"{Path(reward.source).name}: {size:,} weights, loaded")
