"""Checks prompts: splits, duplicates, lengths, and one prompt as the model sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from posttrain.build.questions import shared_prompts
from posttrain.build.rendered_prompts import check_room, make_room, render_prompts
from posttrain.build.rows import data_told
from posttrain.build.trained_rows import asks_test, how_to_test
from posttrain.check.bench import Bench
from posttrain.check.texts import TOKENS
from posttrain.check.verdicts import State, Verdict
from posttrain.config.quantities import in_passes
from posttrain.data.template import words
from posttrain.models.cache import context_length
from posttrain.track.printable import counted, printable
from posttrain.types import Prompt, columns_text

MAX_RENDERED = 2000
MAX_LEAK = 0.1
SHOWN = 160
MANY_PASSES = 100


def say_understood(bench: Bench) -> Iterator[Verdict]:
    """Which columns of the data are taken for what, with a row of each source."""
    for line in data_told(bench.recipe, bench.task if bench.has("task") else None):
        yield Verdict("pass", line)


def count_prompts(bench: Bench) -> Verdict:
    """How many prompts there are, and whether they are enough for the stages."""
    bench.splits = {"train": bench.task.prompts("train"), "test": bench.task.prompts("test")}
    train, test = (len(prompts) for prompts in bench.splits.values())
    if not train and "rl" in bench.stages:
        return Verdict("fail", "no train prompts", "give the task a train split")
    if not test and "eval" in bench.stages:
        text = f"{train:,} train prompts and no test prompts, but the stage eval asks for some"
        return Verdict("fail", text, f"{how_to_test(bench.recipe.task)}, or drop [eval]")
    return Verdict(
        "warn" if 0 < train < test and "rl" in bench.stages else "pass",
        f"{train:,} train, {test:,} test",
        "hold out less: more prompts are held out than there are to learn from",
    )


def find_repeated(bench: Bench) -> Iterator[Verdict]:
    """Whether a prompt occurs twice, or in both splits."""
    train, test = bench.splits.values()
    asked = _asked(bench, train)
    known = Counter(asked)
    extra = len(train) - len(known)
    if train:
        yield Verdict(
            "warn" if extra else "pass",
            f"{extra} of {len(train)} train prompts repeat another, apart from case and white space"
            if extra
            else "none in train",
            "drop them, or they are learned more often than the others",
        )
    if train and test:
        asked = _asked(bench, test)
        leaked = [prompt for prompt, text in zip(test, asked, strict=True) if text in known]
        many = len(leaked) > MAX_LEAK * len(test) and asks_test(bench.recipe)
        yield Verdict(
            "fail" if many else "warn" if leaked else "pass",
            f"{len(leaked)} of {len(test)} test prompts are in train, apart from case and white "
            f"space; the first is {leaked[0].id}"
            if leaked
            else "none",
            "remove them from one side, or the test measures memory",
            "train/test overlap",
        )


def _asked(bench: Bench, prompts: Sequence[Prompt]) -> list[str]:
    """Prompts as the template writes them (without one, as they are), folded for comparison.

    With their columns, where an environment plays them.
    """
    if not bench.has("setup"):
        said = [(p.text, *(message["content"] for message in p.messages)) for p in prompts]
        asked = [words(" ".join(texts)).casefold() for texts in said]
    else:
        bench.template.prepare(prompts)
        asked = [bench.template.question(prompt).casefold() for prompt in prompts]
    if not bench.played:
        return asked
    return [f"{text} {columns_text(p)}" for text, p in zip(asked, prompts, strict=True)]


def render_first(bench: Bench) -> None:
    """A prompt as the model sees it."""
    for prompt in bench.some_prompts(1):
        bench.rendered = bench.template.render(prompt)


def show_prompt(bench: Bench) -> Verdict:
    """One prompt with its special tokens, and a warning where it was wrapped twice."""
    template, (prompt,) = bench.template, bench.some_prompts(1)
    said = prompt.text or " ".join(message["content"] for message in prompt.messages)
    starts = template.tokenizer.bos_token_id
    text = f"{len(bench.rendered.tokens)} tokens: {printable(bench.rendered.text, limit=SHOWN)}"
    state: State = "warn"
    if template.chat and template.control.spelled(said):
        text += "  (chat tokens are in the prompt's own text, and the template adds its own)"
    elif starts is not None and bench.rendered.tokens[:2] == (starts, starts):
        text += "  (it begins with the start token twice)"
    else:
        state = "pass"
    return Verdict(state, text, f"give the bare question; or set model.chat to false, and {TOKENS}")


def check_context(bench: Bench) -> None:
    """Raise unless every stage leaves context for a prompt; sets the limit of answers."""
    recipe = bench.recipe
    check_room(bench.setup)
    if "rl" in recipe.stages:
        bench.limit = recipe.rl.max_new_tokens
    elif "eval" in recipe.stages:
        bench.limit = recipe.eval.max_new_tokens


def fit_prompts(bench: Bench) -> Verdict | None:
    """How long the prompts of each split are, and how many are left out."""
    limit, context = bench.limit, context_length(bench.policy.model)
    asked = {"train": bench.some_prompts(MAX_RENDERED), "test": bench.splits["test"]}
    if not asked["train"]:
        return None
    text, longest = "", 0
    state: State = "pass"
    for split, prompts in asked.items():
        kept, dropped = render_prompts(
            prompts[:MAX_RENDERED], bench.template, policy=bench.policy, max_new_tokens=limit
        )
        if split == "train":
            longest = max(len(prompt.tokens) for prompt in kept)
        if dropped:
            total, state = len(kept) + dropped, "warn"
            share = f"{dropped} of {total} {split} prompts ({dropped / total:.0%})"
            text += f"; {share} are longer and left out"
    most = "any" if context is None else f"{context - limit}"
    fit = f"at most {longest} of {most} tokens"
    left = f"room for {most} tokens{text}; the train prompts that fit have at most {longest}"
    return Verdict(state, left if text else fit, make_room(bench.setup, limit))


def count_passes(bench: Bench) -> Verdict | None:
    """How often rl goes through its prompts."""
    steps, asked, num = bench.rl.steps, bench.rl.prompts_per_step, len(bench.task.prompts("train"))
    if not num:
        return None
    count = steps * asked / num
    how = f"{counted(steps, 'step')} × {counted(asked, 'prompt')} ÷ {num:,}"
    text = f"{in_passes(count):,} epochs ({how})"
    fix = "give more prompts, or lower rl.steps: what is asked so often is learned by heart"
    if asked > num:
        text += f"; each batch repeats prompts: {asked} of {num}"
        fix = f"lower rl.prompts_per_step to {num} or less, or give more prompts"
    return Verdict("warn" if asked > num or count > MANY_PASSES else "pass", text, fix)


def count_shared(bench: Bench) -> Verdict | None:
    """How many prompts of rl have a demonstration in sft."""
    num = len(bench.task.prompts("train"))
    if not num or "sft" not in bench.recipe.stages:
        return None
    shared = shared_prompts(bench.recipe, bench.task, template=bench.template)
    return Verdict("pass", f"{shared:,} of the {num:,} prompts of rl have a demonstration in sft")
