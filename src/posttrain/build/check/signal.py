"""Is there anything to learn from? A few real rollouts, sampled and scored as a run would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.build.check.answers import Answers
from posttrain.build.check.bench import Bench
from posttrain.build.check.report import Findings, State
from posttrain.build.parts import filled, make_sampling, render_prompts
from posttrain.config.asked import compared, wants_greedy
from posttrain.pipelines.evaluate import pass_at_k, share
from posttrain.protocols import Engine
from posttrain.rollout.collect import by_group, collect_scored
from posttrain.rollout.source import PromptCycle, has_signal
from posttrain.types import Prompt, Rollout
from posttrain.types.marks import Marks, above_one, is_right

PROMPTS, FAST_PROMPTS = 8, 4
MAX_GROUP, MAX_ROLLOUTS = 16, 128
AGAIN = 3  # times as many prompts before it is said that nothing can be learned
MAX_GRADING = 20.0  # seconds that grading them may take
RENDERED = 500
SAMPLING = ("rl.temperature", "rl.top_p", "rl.group_size")  # settings that say what is sampled


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Scored rollouts in groups, and the seconds that sampling and grading took."""

    groups: Sequence[Sequence[Rollout]]
    rollout_seconds: float
    grade_seconds: float

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them, groups numbered from 0."""
        return [
            replace(rollout, group=number)
            for number, group in enumerate(self.groups)
            for rollout in group
        ]

    @property
    def useful(self) -> int:
        """Groups with something to compare; single completions are compared with each other."""
        if all(len(group) == 1 for group in self.groups):
            return len(self.groups) if has_signal([group[0] for group in self.groups]) else 0
        return sum(has_signal(group) for group in self.groups)

    def part(self, limit: int) -> list[Rollout]:
        """At most ``limit`` rollouts in whole groups (one at least), those with signal first."""
        size = len(self.groups[0])
        order = sorted(self.groups, key=lambda group: not has_signal(group))
        return replace(self, groups=order[: max(1, limit // size)]).rollouts

    def plus(self, other: Sampled) -> Sampled:
        """Both together."""
        return Sampled(
            groups=[*self.groups, *other.groups],
            rollout_seconds=self.rollout_seconds + other.rollout_seconds,
            grade_seconds=self.grade_seconds + other.grade_seconds,
        )


def engine_of(bench: Bench) -> Engine:
    """The engine, where it could be made."""
    assert bench.engine is not None, "asked only once it could be made"
    return bench.engine


def sample(bench: Bench, *, seconds_per_grade: float) -> Sampled:
    """The first prompts of a run, answered in groups; more of them where none has signal."""
    section = filled(bench.recipe.rl)
    size = min(section.group_size, max(MAX_GROUP, compared(section)))
    affordable = int(MAX_GRADING / max(seconds_per_grade, 1e-6) / size)
    wanted = FAST_PROMPTS if bench.fast else PROMPTS
    count = min(max(wanted, 4 * wanted // size), max(1, MAX_ROLLOUTS // size))
    count = max(1, min(count, affordable))
    rendered, _ = render_prompts(
        bench.some_prompts(RENDERED),
        bench.of_parts().template,
        policy=bench.of_policy(),
        max_new_tokens=section.max_new_tokens,
    )
    prompts = PromptCycle(rendered, seed=bench.recipe.run.seed)
    found = _answered(bench, prompts.take(count), size=size)
    more = min(AGAIN * count, affordable - count)
    if not found.useful and more > 0 and found.rollout_seconds < 10:
        found = found.plus(_answered(bench, prompts.take(more), size=size))
    return found


def _answered(bench: Bench, prompts: Sequence[Prompt], *, size: int) -> Sampled:
    section, scorer = filled(bench.recipe.rl), bench.of_parts().scorer
    assert scorer is not None
    found = collect_scored(
        prompts,
        make_sampling(section),
        engine=engine_of(bench),
        scorer=scorer,
        num_samples=size,
        seed=bench.recipe.run.seed,
        greedy=wants_greedy(section),
        **bench.of_parts().replies,
    )
    return Sampled(
        groups=by_group(found.rollouts),
        rollout_seconds=found.seconds["rollout"],
        grade_seconds=found.seconds["reward"],
    )


def check_signal(bench: Bench, sampled: Sampled, *, answers: Answers, findings: Findings) -> None:
    """How often the model is right, whether groups differ, whether completions come to an end."""
    _check_broken(bench, sampled, findings=findings)
    with findings.excused(bench.excuse):
        _check_accuracy(bench, sampled, findings=findings)
        _check_groups(bench, sampled, answers=answers, findings=findings)
    _check_length(bench, sampled, findings=findings)


def _check_broken(bench: Bench, sampled: Sampled, *, findings: Findings) -> None:
    scores = [r.score for r in sampled.rollouts if r.score is not None]
    broken = [score for score in scores if not score.ok]
    if not broken:
        return
    part = len(broken) / len(scores)
    findings.judged(
        "broken scores",
        f"{part:.0%} of {len(scores)} real rollouts; the first: {broken[0].reason}",
        state="fail" if part > filled(bench.recipe.rl).max_invalid else "warn",
        fix="mend the reward: above rl.max_invalid the run stops",
    )


def _check_accuracy(bench: Bench, sampled: Sampled, *, findings: Findings) -> None:
    marks = bench.of_parts().marks
    counts = [sum(is_right(r, marks) for r in group) for group in sampled.groups]
    size = len(sampled.groups[0])
    total = len(counts) * size
    best = sum(pass_at_k(size, count, k=size) for count in counts) / len(counts)
    text = f"pass@1 {share(sum(counts), total)}"
    text += f", pass@{size} {best:.0%}" if size > 1 else ""
    values = [r.score.value for r in sampled.rollouts if r.score is not None and r.score.ok]
    mean = f"{sum(values) / len(values):.2f}" if values else "none"
    text += f", mean reward {mean}"
    if not marks.judged or above_one(sampled.rollouts, marks):
        findings.passed("mean reward", f"{mean}; no answer has full marks")
        return
    learned = any(marks.weights.get(name) for name in marks.judged)  # else it is only monitored
    findings.judged(
        "accuracy" if marks.check else "full marks",
        f"{text} (right by {marks.check!r})" if marks.check else text,
        state="warn" if not sum(counts) and sampled.useful and learned else "pass",
        fix=bench.usual_first(
            f"{_learnable(marks)}: take an easier task, or {_warmer(bench)}", of=SAMPLING
        ),
    )


def _learnable(marks: Marks) -> str:
    """What there is to learn from where nothing has full marks, and yet scores differ."""
    others = [n for n, weight in marks.weights.items() if weight and n not in marks.judged]
    if others:
        return f"no answer is right, so only the other rewards ({', '.join(others)}) can be learned"
    missing = "no answer is right" if marks.check else "no completion has full marks"
    return f"{missing}, so only the differences between lower marks can be learned"


def _check_groups(bench: Bench, sampled: Sampled, *, answers: Answers, findings: Findings) -> None:
    """That few groups agree is no proof: a run asks many more. It is where no score can differ."""
    useful, total = sampled.useful, len(sampled.groups)
    if not useful:
        text, fix = _nothing(bench, sampled)
        constant = _constant(sampled, answers)
        if constant is not None:
            text += f"; gold, wrong and empty answers get {constant:g} too: the reward is constant"
            fix = "mend the reward: there is nothing that it tells apart"
        state: State = "fail" if constant is not None else "warn"
        findings.judged("groups with signal", text, state=state, fix=fix)
        return
    part = useful / total
    findings.judged(
        "groups with signal",
        f"{useful} of {total} ({part:.0%})",
        state="warn" if part < 0.2 else "pass",
        fix=bench.usual_first(
            "most of the time is wasted: set rl.dynamic_sampling, raise rl.group_size, or take "
            "prompts of a difficulty that fits",
            of=SAMPLING,
        ),
    )


def _constant(sampled: Sampled, answers: Answers) -> float | None:
    """The one score that every answer gets, known and sampled; None where there are two, or no
    gold answers to see another with.
    """
    rollouts = [*sampled.rollouts, *answers.everything]
    scores = {r.score.value for r in rollouts if r.score is not None and r.score.ok}
    return scores.pop() if len(scores) == 1 and answers.valid("gold") else None


def _nothing(bench: Bench, sampled: Sampled) -> tuple[str, str]:
    """Why all groups agree, and what to change."""
    marks, rollouts = bench.of_parts().marks, sampled.rollouts
    right = sum(is_right(rollout, marks) for rollout in rollouts)
    alike = all(len({r.tokens for r in group}) == 1 for group in sampled.groups)
    many = len(sampled.groups) > 1 and len(sampled.groups[0]) > 1
    if all(r.score is None or not r.score.ok for r in rollouts):
        why, fix = "no score is valid", "mend the reward"
    elif right == len(rollouts):
        why = "all right"
        fix = "take a harder task, or mend a reward that gives full marks to everything"
    elif all(is_right(rollout, replace(marks, check="")) for rollout in rollouts):
        why, fix = "full marks for all", "mend a reward that gives full marks to everything"
    elif alike and many:
        why = "all completions of a prompt are the same"
        fix = bench.usual_first("raise rl.temperature", of=SAMPLING)
    elif right == 0:
        why = "all wrong" if marks.judged else "all alike"
        fix = bench.usual_first(
            f"take an easier task, {_warmer(bench)}, give partial credit in [rewards], or raise "
            "rl.group_size or rl.temperature",
            of=SAMPLING,
        )
    else:
        why = "some all right, some all wrong"
        fix = bench.usual_first(
            "raise rl.temperature or rl.group_size, or take prompts in between", of=SAMPLING
        )
    text = f"nothing to learn from: 100 % of {len(sampled.groups)} groups agree ({why})"
    return text, fix


def _check_length(bench: Bench, sampled: Sampled, *, findings: Findings) -> None:
    limit = filled(bench.recipe.rl).max_new_tokens
    turns = [turn for rollout in sampled.rollouts for turn in rollout.turns if turn.sampled]
    lengths = [len(turn.tokens) for turn in turns]
    cut = sum(turn.stop_reason == "length" for turn in turns) / len(lengths)
    findings.judged(
        "length",
        f"mean {sum(lengths) / len(lengths):.1f} of {limit} tokens, {cut:.0%} truncated",
        state="warn" if cut > 0.5 else "pass",  # what is cut can still be graded
        fix=bench.usual_first(
            f"raise rl.max_new_tokens, or {_warmer(bench)}, so that answers come to an end",
            of=SAMPLING,
        ),
    )


def _warmer(bench: Bench) -> str:
    """How sft can help, whether it is there or not."""
    return "raise sft.epochs" if "sft" in bench.recipe.stages else "add [sft] before"
