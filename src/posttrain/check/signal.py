"""Is there anything to learn from? A few real rollouts, sampled and scored as a run would.

One of them is shown as it is learned from: every token, who wrote it, and the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from posttrain.build.rendered_prompts import render_prompts
from posttrain.build.sampler import make_sampling
from posttrain.check.answers import scores, valid
from posttrain.check.bench import Bench
from posttrain.check.verdicts import TokenRow, Verdict
from posttrain.config.piece_facts import min_group_size, wants_greedy
from posttrain.data.collate import collate
from posttrain.data.template import PromptTooLong, Template
from posttrain.pipelines.evaluate import pass_at_k, share
from posttrain.rollout.collect import by_group, collect_scored, has_signal
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.track.printable import counted, printable
from posttrain.track.progress import phase
from posttrain.types import Prompt, Rollout
from posttrain.types.marks import Marks, exceeding_one, is_right

PROMPTS, FAST_PROMPTS = 8, 4
MAX_GROUP, MAX_ROLLOUTS = 16, 128
AGAIN = 3  # times as many prompts are sampled before the check says that nothing can be learned
MAX_GRADING = 20.0  # seconds that grading the sampled rollouts may take
RENDERED = 500
SAMPLING = ("rl.temperature", "rl.top_p", "rl.group_size")  # settings that decide what is sampled


def useful(groups: Sequence[Sequence[Rollout]]) -> int:
    """Groups with something to compare; single completions are compared with each other."""
    if all(len(group) == 1 for group in groups):
        return len(groups) if has_signal([group[0] for group in groups]) else 0
    return sum(has_signal(group) for group in groups)


def sample(bench: Bench) -> Verdict | None:
    """Sample and score a few rollouts; a line only where that cannot be done."""
    why = "a part it needs could not be made"
    if bench.has("answers engine"):
        why = "no score is valid"
        if scores(bench.known) or not bench.known:
            try:
                return _sample(bench)
            except PromptTooLong:  # another line of the report says how many are too long
                why = "no prompt leaves room for an answer"
    text = f"signal, numerics and resources: {why}"
    return Verdict("warn", text, "fix what fails above, then check again", "not checked")


@phase("checking: a few rollouts")
def _sample(bench: Bench) -> None:
    """The first prompts of a run, answered in groups; more of them where none has signal."""
    graded = [r.score.seconds for r in bench.known if r.score is not None]
    size = min(bench.rl.group_size, max(MAX_GROUP, min_group_size(bench.rl)))
    per_grade = max(sum(graded) / max(1, len(graded)), 1e-6)
    affordable = int(MAX_GRADING / per_grade / size)
    wanted = FAST_PROMPTS if bench.fast else PROMPTS
    count = min(max(wanted, 4 * wanted // size), max(1, MAX_ROLLOUTS // size))
    count = max(1, min(count, affordable))
    rendered, _ = render_prompts(
        bench.some_prompts(RENDERED),
        bench.template,
        policy=bench.policy,
        max_new_tokens=bench.rl.max_new_tokens,
    )
    prompts = PromptCycle(rendered, seed=bench.recipe.run.seed)
    groups, spent = _answered(bench, prompts.take(count), size=size)
    more = min(AGAIN * count, affordable - count)
    if not useful(groups) and more > 0 and spent["rollout"] < 10:
        others, longer = _answered(bench, prompts.take(more), size=size)
        groups = [*groups, *others]
        spent = {part: seconds + longer[part] for part, seconds in spent.items()}
    bench.seconds = spent
    bench.groups = [[replace(r, group=n) for r in group] for n, group in enumerate(groups)]


def _answered(
    bench: Bench, prompts: Sequence[Prompt], *, size: int
) -> tuple[Sequence[Sequence[Rollout]], Mapping[str, float]]:
    found = collect_scored(
        prompts,
        make_sampling(bench.rl),
        engine=bench.engine,
        scorer=bench.scorer,
        num_samples=size,
        seed=bench.recipe.run.seed,
        greedy=wants_greedy(bench.rl),
        env=bench.setup.env,
    )
    return by_group(found.rollouts), found.seconds


def measure_accuracy(bench: Bench) -> Verdict:
    """How often the model is right."""
    marks, groups = bench.setup.marks, bench.groups
    counts = [sum(is_right(r, marks) for r in group) for group in groups]
    size = len(groups[0])
    best = sum(pass_at_k(size, count, k=size) for count in counts) / len(counts)
    text = f"pass@1 {share(sum(counts), len(counts) * size)}"
    text += f", pass@{size} {best:.0%}" if size > 1 else ""
    values = [score.value for score in scores(bench.rollouts)]
    mean = f"{sum(values) / len(values):.2f}" if values else "none"
    if bench.env_scores:
        given = f"{mean} by the environment, from {min(values):g} to {max(values):g}"
        shown = f"; {text} by {marks.check!r}, which is only shown" if marks.check else ""
        return Verdict("pass", given + shown, name="mean score")
    if not marks.counted_rewards or exceeding_one(bench.rollouts, marks):
        return Verdict("pass", f"{mean}; no answer has full marks", name="mean reward")
    text += f", mean reward {mean}"
    # Otherwise the check of answers is only monitored.
    learned = any(marks.weights.get(name) for name in marks.counted_rewards)
    fix = f"{_learnable(marks)}: take an easier task, or {_warmer(bench)}"
    return Verdict(
        "warn" if marks.check and not sum(counts) and useful(groups) and learned else "pass",
        f"{text} (right by {marks.check!r})" if marks.check else text,
        bench.usual_first(fix, of=SAMPLING),
        "" if marks.check else "full marks",
    )


def _learnable(marks: Marks) -> str:
    """What can be learned where scores differ although no answer has full marks."""
    others = [n for n, weight in marks.weights.items() if weight and n not in marks.counted_rewards]
    if others:
        return f"no answer is right, so only the other rewards ({', '.join(others)}) can be learned"
    return "no answer is right, so only the differences between lower marks can be learned"


def compare_groups(bench: Bench) -> Verdict:
    """Whether scores differ within groups.

    A few groups without a difference only warn, for a run samples many more; it fails where all
    answers, known ones included, get the same score.
    """
    differ, total = useful(bench.groups), len(bench.groups)
    if not differ:
        text, fix = _nothing(bench)
        constant = _constant(bench)
        if constant is None:
            return Verdict("warn", text, fix)
        text += f"; gold, wrong and empty answers get {constant:g} too: the reward is constant"
        also = f", or {_weigh(bench.setup.marks)}" if bench.setup.marks.only_shown else ""
        return Verdict("fail", text, f"fix the reward: there is nothing that it tells apart{also}")
    fix = (
        "most of the time is wasted: set rl.dynamic_sampling, raise rl.group_size, or take "
        "prompts of a difficulty that fits"
    )
    return Verdict(
        "warn" if differ / total < 0.2 else "pass",
        f"{differ} of {total} ({differ / total:.0%})",
        bench.usual_first(fix, of=SAMPLING),
    )


def _constant(bench: Bench) -> float | None:
    """The one score that every answer gets, known and sampled; None where there are two, or no
    gold answers to see another with, which an environment does not score.
    """
    if bench.env_scores:
        return None
    found = {score.value for score in scores([*bench.rollouts, *bench.known])}
    return found.pop() if len(found) == 1 and valid(bench, "gold") else None


def _nothing(bench: Bench) -> tuple[str, str]:
    """Why the scores of all groups are equal, and what to change."""
    marks, rollouts, groups = bench.setup.marks, bench.rollouts, bench.groups
    right = sum(is_right(rollout, marks) for rollout in rollouts)
    alike = all(len({r.tokens for r in group}) == 1 for group in groups)
    many = len(groups) > 1 and len(groups[0]) > 1
    full = "fix a reward that gives full marks to everything"
    if not scores(rollouts):
        why, fix = "no score is valid", f"fix {bench.to_fix}"
    elif bench.env_scores:
        values = {score.value for score in scores(rollouts)}
        why = "a prompt's episodes all score the same"
        why = f"every episode scores {values.pop():g}" if len(values) == 1 else why
        fix = f"take an easier task, {_warmer(bench)}, let the environment give partial credit, or "
        fix = bench.usual_first(fix + "raise rl.group_size or rl.temperature", of=SAMPLING)
    elif marks.only_shown and not (alike and many):
        values = {score.value for score in scores(rollouts)}
        why = "a prompt's completions all get the same reward"
        why = f"every completion gets {values.pop():g}" if len(values) == 1 else why
        shown = f"{marks.check!r}, whose weight is 0, accepts {right} of {len(rollouts)}"
        why += f", though {shown}" if right else ""
        fix = f"{_weigh(marks)}, {_warmer(bench)}, or let a reward give partial credit"
        fix = bench.usual_first(fix, of=SAMPLING)
    elif right == len(rollouts):
        why, fix = "all right", f"take a harder task, or {full}"
    elif all(is_right(rollout, replace(marks, check="")) for rollout in rollouts):
        why, fix = "full marks for all", full
    else:
        if alike and many:
            why, fix = "all completions of a prompt are the same", "raise rl.temperature"
        elif right == 0:
            why = "all wrong" if marks.counted_rewards else "all alike"
            fix = f"take an easier task, {_warmer(bench)}, give partial credit in [rewards], or "
            fix += "raise rl.group_size or rl.temperature"
            if bench.recipe.model.name == "tiny" and "sft" not in bench.recipe.stages:
                fix = 'add [sft] before: the model "tiny" has random weights, and no group_size '
                fix += "makes up for that; or give partial credit in [rewards]"
        else:
            why = "some all right, some all wrong"
            fix = "raise rl.temperature or rl.group_size, or take prompts in between"
        fix = bench.usual_first(fix, of=SAMPLING)
    return f"nothing to learn from: 100% of {len(groups)} groups agree ({why})", fix


def _weigh(marks: Marks) -> str:
    return f"give {marks.check!r} a weight in [rewards], so that it is learned from"


def measure_length(bench: Bench) -> Verdict:
    """Whether completions come to an end."""
    turns = [turn for rollout in bench.rollouts for turn in rollout.turns if turn.sampled]
    lengths = [len(turn.tokens) for turn in turns]
    cut = sum(turn.stop_reason == "length" for turn in turns) / len(lengths)
    # Only a warning, and none where cut completions earn as much: they can still be graded.
    fine = cut <= 0.5 or (not bench.setup.marks.check and _cut_ones_earn(bench.rollouts))
    several = ""
    if bench.setup.env is not None:
        several = f" a turn, {len(turns) / len(bench.rollouts):.1f} turns a rollout"
    fix = f"raise rl.max_new_tokens, or {_warmer(bench)}, so that answers come to an end"
    return Verdict(
        "pass" if fine else "warn",
        f"mean {sum(lengths) / len(lengths):.1f} of {bench.rl.max_new_tokens} tokens{several}, "
        f"{cut:.0%} truncated",
        bench.usual_first(fix, of=SAMPLING),
    )


def _cut_ones_earn(rollouts: Sequence[Rollout]) -> bool:
    """Whether cut completions differ in their scores, and have no less than finished ones."""
    valid = [r for r in rollouts if r.score is not None and r.score.ok]
    cut = [r.score.value for r in valid if r.score and r.stop_reason == "length"]
    ended = [r.score.value for r in valid if r.score and r.stop_reason != "length"]
    return len(set(cut)) > 1 and (not ended or fmean(cut) >= fmean(ended))


def _warmer(bench: Bench) -> str:
    """Advice to use, or to prolong, the stage sft."""
    return "raise sft.epochs" if "sft" in bench.recipe.stages else "add [sft] before"


def show_episode(bench: Bench) -> Verdict | None:
    """The first rollout in which the environment spoke, else the first, token by token."""
    if bench.setup.env is None:
        return None
    rollout = max(bench.rollouts, key=lambda each: len(each.turns) > 1)
    batch = collate([rollout], pad_token=bench.policy.pad_token)
    turns = {True: "policy", False: "environment"}
    writers = ["prompt"] * len(rollout.prompt.tokens)
    writers += [turns[turn.sampled] for turn in rollout.turns for _ in turn.tokens]
    columns = zip(batch.tokens[0].tolist(), writers, batch.mask[0].tolist(), strict=True)
    bench.episode = [
        TokenRow(token, _text(token, bench.template), writer, trained)
        for token, writer, trained in columns
    ]
    trained = sum(row.trained for row in bench.episode)
    text = (
        f"{counted(len(rollout.turns), 'turn')}, {trained} of {len(rollout.tokens)} tokens after "
        "the prompt are trained on, those of the policy; token by token below"
    )
    right = all(row.trained == (row.writer == "policy") for row in bench.episode)
    fix = "report this as a bug in posttrain: only tokens of the policy may be trained on"
    return Verdict("pass" if right else "fail", text, fix)


def _text(token: int, template: Template) -> str:
    """What a token spells; of one that is a part of a character, its name in the vocabulary."""
    text = template.tokenizer.decode([token], clean_up_tokenization_spaces=False)
    name = template.tokenizer.convert_ids_to_tokens(token)
    return printable(name if "\ufffd" in text or not text else text)
