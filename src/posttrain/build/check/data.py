"""Is the data what it is taken for? Gold answers, duplicates, leaks, lengths, the prompt itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

from posttrain.build.check.answers import Answers, mend_gold
from posttrain.build.check.bench import Bench, heard
from posttrain.build.check.report import Findings, State
from posttrain.build.parts import check_room, make_template, render_prompts
from posttrain.build.passes import passes, shared_prompts
from posttrain.build.preference_rows import backbone_of, reward_rows
from posttrain.build.sft_rows import sft_rows
from posttrain.build.texts import TOKENS, find_notes, read_rows
from posttrain.build.trained_rows import (
    APART,
    asks_test,
    demonstrated_tests,
    preferred_tests,
    told_leak,
)
from posttrain.config import RewardSection, SftSection
from posttrain.data.template import words
from posttrain.models.cache import context_length
from posttrain.protocols import Task
from posttrain.track.text import printable
from posttrain.types import Prompt
from posttrain.types.marks import above_one, how_to_declare, is_right

MAX_RENDERED = 2000
MAX_LEAK = 0.1
SHOWN = 160
MANY_PASSES = 100


def check_splits(bench: Bench, findings: Findings) -> None:
    """How many prompts there are, and whether any is there twice or on both sides."""
    task, splits = bench.task, None
    if task is None:
        return
    with findings.guard("prompts"):
        splits = task.prompts("train"), task.prompts("test")
    if splits is None:
        return
    train, test = splits
    _check_sizes(bench, findings, task=task)
    asked = {split: _asked(bench, task.prompts(split)) for split in ("train", "test")}
    known = Counter(asked["train"])
    if train:
        extra = len(train) - len(known)
        findings.judged(
            "duplicates",
            f"{extra} of {len(train)} train prompts repeat another, but for case and white space"
            if extra
            else "none in train",
            state="warn" if extra else "pass",
            fix="drop them, or they are learned more often than the others",
        )
    if train and test:
        leaked = [p for p, text in zip(test, asked["test"], strict=True) if text in known]
        many = len(leaked) > MAX_LEAK * len(test) and asks_test(bench.recipe)
        state: State = "fail" if many else "warn" if leaked else "pass"
        findings.judged(
            "train/test overlap",
            f"{len(leaked)} of {len(test)} test prompts are in train, but for case and white "
            f"space; the first is {leaked[0].id}"
            if leaked
            else "none",
            state=state,
            fix="remove them from one side, or the test measures memory",
        )


def check_leaks(bench: Bench, findings: Findings) -> None:
    """Whether demonstrations or preferences of a file hold problems that the run is measured by."""
    recipe, task = bench.recipe, bench.task
    if task is None or bench.under_way:
        return
    template = bench.parts.template if bench.parts is not None else None
    state: State = "fail" if asks_test(recipe) else "warn"
    # What cannot be read is told by the checks that follow.
    with contextlib.suppress(OSError, ValueError):
        if found := demonstrated_tests(recipe, task, template=template):
            text = told_leak(found, task, where="sft.data")
            findings.judged("demonstrations of test", text, state=state, fix=APART)
    with contextlib.suppress(OSError, ValueError):
        if found := preferred_tests(recipe, task, template=template):
            text = told_leak(found, task, where="reward.data")
            findings.judged("preferences of test", text, state=state, fix=APART)


def _check_sizes(bench: Bench, findings: Findings, *, task: Task) -> None:
    train, test = len(task.prompts("train")), len(task.prompts("test"))
    stages = bench.recipe.stages
    if not train and "rl" in stages:
        findings.failed("prompts", "no train prompts", fix="give the task a train split")
    elif not test and "eval" in stages:
        findings.failed(
            "prompts",
            f"{train:,} train prompts and no test prompts, but the stage eval asks for some",
            fix="set task.test_share or task.test_path, or drop [eval]",
        )
    else:
        findings.judged(
            "prompts",
            f"{train:,} train, {test:,} test",
            state="warn" if 0 < train < test and "rl" in stages else "pass",
            fix="hold out less: more prompts are held out than there are to learn from",
        )


def _asked(bench: Bench, prompts: Sequence[Prompt]) -> list[str]:
    """Prompts as the model reads them, but for case and white space; as they stand, without one."""
    if bench.parts is None:
        said = [(p.text, *(message["content"] for message in p.messages)) for p in prompts]
        return [words(" ".join(texts)).casefold() for texts in said]
    template = bench.parts.template
    template.prepare(prompts)
    return [template.question(prompt).casefold() for prompt in prompts]


def check_passes(bench: Bench, findings: Findings) -> None:
    """How often rl goes through its prompts, and whether sft has shown it their answers."""
    if "rl" not in bench.recipe.stages or bench.task is None:
        return
    found = passes(bench.recipe.rl, len(bench.task.prompts("train")))
    if found is None:
        return
    again = f"; each batch asks prompts again: {found.prompts_per_step} of {found.num_prompts}"
    findings.judged(
        "passes",
        f"{found}{again if found.repeats else ''}",
        state="warn" if found.repeats or found.count > MANY_PASSES else "pass",
        fix=f"lower rl.prompts_per_step to {found.num_prompts} or less, or give more prompts"
        if found.repeats
        else "give more prompts, or lower rl.steps: what is asked so often is learned by heart",
    )
    if "sft" in bench.recipe.stages:
        with findings.guard("sft and rl prompts"):
            shared = shared_prompts(bench.recipe, bench.task, template=bench.of_parts().template)
            text = (
                f"{shared:,} of the {found.num_prompts:,} prompts of rl have a demonstration in sft"
            )
            findings.passed("sft and rl prompts", text)


def check_answers(bench: Bench, answers: Answers, *, findings: Findings) -> None:
    """Gold answers get full marks; someone else's and none at all do not.

    A reward that does not look at the data claims nothing of right and wrong: of it nothing fails.
    """
    if not answers.marks.judged:
        findings.passed("gold answers", "nothing checks answers, and no reward has full marks")
        return
    for name, largest in above_one(answers.everything, answers.marks).items():
        text, _, fix = how_to_declare(name, largest).partition(": ")
        findings.warned("full marks", text, fix=fix)
        return
    asked = bool(answers.marks.check) or answers.claims
    if not asked:
        text = "no reward looks at the data beside prompt and completion: none is right or wrong"
        findings.passed("gold answers", text)
    elif answers.no_gold:
        text = f"none to try the rewards with: {answers.no_gold.partition(';')[0]}"
        findings.warned("gold answers", text, fix="add an answer column, if there are answers")
    else:
        _check_gold(bench, answers, findings=findings)
    empty, right = answers.earned("empty"), answers.right("empty") or 0.0
    if empty is not None:
        findings.judged(
            "empty answers",
            f"{empty:.0%} get full marks",
            state="fail"
            if right > 0.5 or (empty > 0.5 and answers.claims)
            else ("warn" if empty else "pass"),
            fix="mend the reward: saying nothing would be learned first",
        )
    wrong = answers.right("wrong")
    if wrong is not None and asked:
        findings.judged(
            "shuffled answers",
            f"{wrong:.0%} (those to another question) get full marks",
            state="warn" if wrong > 0.05 else "pass",
            fix="mend the reward, unless one answer may well fit many questions",
        )


def _check_gold(bench: Bench, answers: Answers, *, findings: Findings) -> None:
    share = answers.right("gold")
    fix = "mend the answers, or let the reward read them where they stand"
    if share is None:
        text = "none could be graded: see broken scores, below"
        findings.failed("gold answers", text, fix="mend the reward")
        return
    count = len(answers.valid("gold"))
    text = f"{share:.0%} of {count} get full marks from {answers.judges}"
    if share == 1:
        findings.passed("gold answers", text)
        return
    gold, others = answers.decided("gold") or 0.0, _best_other(answers)
    better = others is not None and gold > others
    shown = _first(answers)
    mend = mend_gold(bench, answers)
    if mend:
        fix = mend
    elif better and share == 0:
        text += f", though they score {gold:.2f} on average and others {others:.2f}"
        fix = "let the reward give 1 for full marks, or declare its maximum: accuracy counts those"
    # Gold that cannot be told from anything else teaches nothing; gold that only often gets full
    # marks does.
    findings.judged("gold answers", f"{text}; {shown}", state="warn" if better else "fail", fix=fix)


def check_answer_length(bench: Bench, answers: Answers, *, findings: Findings) -> None:
    """Whether there is room for the gold answers, end token and all."""
    limit = _limit(bench)
    lengths = [len(rollout.completion.tokens) for rollout in answers.scored.get("gold", [])]
    if limit is None or not lengths:
        return
    long = sum(length > limit for length in lengths) / len(lengths)
    findings.judged(
        "answer length",
        f"gold answers have at most {max(lengths)} of {limit} tokens"
        + (f"; {long:.0%} do not fit" if long else ""),
        state="warn" if long else "pass",  # an answer may be shorter than the gold one
        fix="raise max_new_tokens, unless shorter answers can be right",
    )


def _best_other(answers: Answers) -> float | None:
    means = [answers.decided(kind) for kind in ("wrong", "empty")]
    return max((mean for mean in means if mean is not None), default=None)


def _first(answers: Answers) -> str:
    marks = answers.marks
    found = next(rollout for rollout in answers.valid("gold") if not is_right(rollout, marks))
    parts = found.score.parts if found.score is not None else {}
    values = " and ".join(f"{parts.get(name, 0.0):g}" for name in marks.judged)
    said = printable(found.completion.text, limit=60)
    return f'{found.prompt.id}: the gold answer is "{said}" and scores {values}'


def check_prompts(bench: Bench, findings: Findings) -> None:
    """The prompts as the model sees them: their length, and one of them in full."""
    prompts = bench.some_prompts(MAX_RENDERED)
    if not prompts or bench.task is None:
        return
    parts, policy = bench.of_parts(), bench.of_policy()
    with findings.guard("prompt"):
        rendered = parts.template.render(prompts[0])
        with findings.attempt("prompt"):
            _show(bench, findings, prompt=prompts[0], rendered=rendered)
    limit = None
    with findings.guard("room for answers"):
        check_room(bench.recipe, parts, policy=policy)
        limit = _limit(bench)
    if limit is None:
        return
    found: dict[str, tuple[list[Prompt], int]] = {}
    with findings.guard("prompt length"):
        for split, asked in (("train", prompts), ("test", bench.task.prompts("test"))):
            found[split] = render_prompts(
                asked[:MAX_RENDERED], parts.template, policy=policy, max_new_tokens=limit
            )
        with findings.attempt("prompt length"):
            _check_length(bench, found, limit=limit, findings=findings)


def _check_length(
    bench: Bench,
    found: Mapping[str, tuple[Sequence[Prompt], int]],
    *,
    limit: int,
    findings: Findings,
) -> None:
    """How long the prompts of each split are, and how many are left out."""
    context = context_length(bench.of_policy().model)
    longest = max(len(prompt.tokens) for prompt in found["train"][0])
    text = f"at most {longest} of {'any' if context is None else f'{context - limit}'} tokens"
    for split, (kept, dropped) in found.items():
        if dropped:
            total = len(kept) + dropped
            share = f"{dropped} of {total} {split} prompts ({dropped / total:.0%})"
            text += f"; {share} are longer and left out"
    findings.judged(
        "prompt length",
        text,
        state="warn" if any(dropped for _, dropped in found.values()) else "pass",
        fix=f"lower max_new_tokens = {limit}, or shorten the prompts",
    )


def _limit(bench: Bench) -> int | None:
    recipe = bench.recipe
    if "rl" in recipe.stages:
        return recipe.rl.max_new_tokens
    return recipe.eval.max_new_tokens if "eval" in recipe.stages else None


def _show(bench: Bench, findings: Findings, *, prompt: Prompt, rendered: Prompt) -> None:
    """One prompt with its special tokens, and a warning where it was wrapped twice."""
    template = bench.of_parts().template
    tokenizer = template.tokenizer
    wrapped = template.chat and bool(template.control.spelled(_said(prompt)))
    starts = tokenizer.bos_token_id
    doubled = starts is not None and rendered.tokens[:2] == (starts, starts)
    text = f"{len(rendered.tokens)} tokens: {printable(rendered.text, limit=SHOWN)}"
    if wrapped:
        text += "  (chat tokens are in the prompt's own text, and the template adds its own)"
    elif doubled:
        text += "  (it begins with the start token twice)"
    findings.judged(
        "prompt",
        text,
        state="warn" if wrapped or doubled else "pass",
        fix=f"give the bare question; or set model.chat to false, and {TOKENS}",
    )


def _said(prompt: Prompt) -> str:
    return prompt.text or " ".join(message["content"] for message in prompt.messages)


def check_texts(bench: Bench, findings: Findings) -> None:
    """What the tokenizer makes of the data: special tokens, characters, the messages of chats.

    Not in the midst of a run, which has said it at its start.
    """
    if bench.under_way:
        return
    try:
        rows = read_rows(bench.recipe, bench.task, stages=bench.recipe.stages)
    except (OSError, ValueError):  # what cannot be read is told by the checks that follow
        return
    with findings.guard("chat"):
        notes = find_notes(rows, bench.of_parts().template)
        for note in notes:
            findings.warned(note.kind, note.text, fix=note.fix)
        told = {note.kind for note in notes}
        if "special tokens" not in told:
            findings.passed("special tokens", "the data spells none")
        if "characters" not in told:
            findings.passed("characters", "the tokenizer has all of the data's")


def check_demonstrations(bench: Bench, findings: Findings) -> None:
    """The demonstrations of the sft stage can be read, and fit into the model's context."""
    if "sft" not in bench.recipe.stages or bench.under_way:
        return
    with findings.guard("demonstrations"):
        rows = sft_rows(bench.recipe, bench.of_policy(), parts=bench.of_parts()).train
        limit = context_length(bench.of_policy().model)
        lengths = [len(tokens) for tokens, _ in rows]
        long = sum(limit is not None and length > limit for length in lengths)
        findings.judged(
            "demonstrations",
            f"{len(rows):,}, the longest has {max(lengths, default=0)} tokens"
            + (f"; {long} are over the model's context of {limit} and left out" if long else ""),
            state="fail" if long == len(rows) else "warn" if long else "pass",
            fix="shorten the long ones" if long else "give some",
        )
        _check_warmup(bench.recipe.sft, len(rows) - long, stage="sft", findings=findings)


def _check_warmup(
    section: SftSection | RewardSection, num_rows: int, *, stage: str, findings: Findings
) -> None:
    total = section.epochs * -(-num_rows // section.batch_size)
    if section.warmup_steps > total:
        findings.warned(
            f"{stage}.warmup_steps",
            f"{section.warmup_steps}, but {stage} takes {total} optimiser steps: the learning rate "
            "is not reached",
            fix=f"set it to less than {total}",
        )


def check_preferences(bench: Bench, findings: Findings) -> None:
    """Preferences in files can be read, fit the context, and are held out from the others.

    Not in the midst of a run, where the stage has read them.
    """
    section = bench.recipe.reward if "reward" in bench.recipe.stages else None
    if section is None or section.data == "prefer" or bench.under_way:
        return
    with findings.guard("preferences"), heard(findings, "preferences"):
        backbone = backbone_of(bench.recipe, bench.of_policy(), device="cpu")
        template = make_template(bench.recipe, backbone)
        train, test = reward_rows(bench.recipe, backbone, template=template)
        longest = max(len(row) for ranked in (*train, *test) for row in ranked.rows)
        findings.passed(
            "preferences",
            f"{len(train):,} to learn from, {len(test):,} held out, the longest has {longest} "
            "tokens",
        )
        _check_warmup(section, len(train), stage="reward", findings=findings)
