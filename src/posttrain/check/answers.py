"""Grades answers of known quality (gold, that of another row, empty) by the recipe's rewards."""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from posttrain.check.bench import Bench
from posttrain.check.verdicts import Verdict
from posttrain.rewards import REWARDS
from posttrain.rewards.bound import BoundReward
from posttrain.rewards.extraction import Extract, extract_answer
from posttrain.rewards.sample_data import FROM_ROLLOUT
from posttrain.rewards.scorer import RewardScorer
from posttrain.track.printable import printable
from posttrain.types import Prompt, Rollout, Score, Turn
from posttrain.types.marks import Marks, exceeding_one, how_to_declare, is_right

ROWS, FAST_ROWS = 16, 8
MAX_SECONDS = 15.0  # seconds for grading all known answers
# The whole text is compared: if the gold answer has a mark such as \boxed, nothing else matches.
_MARKED: dict[Extract, tuple[str, str]] = {
    "hashes": ("####", "put only what follows it there, or use the task gsm8k"),
    "boxed": ("\\boxed", "put only what it holds there"),
    "tag": ("<answer>", "put only what it holds there"),
}


def grade_answers(bench: Bench) -> None:
    """Grade known answers to a few train prompts; fewer of them where grading is slow."""
    prompts = bench.some_prompts(FAST_ROWS if bench.fast else ROWS)
    texts = _texts(bench, prompts)
    begun = time.perf_counter()
    scored = {kind: _graded(bench, pairs[:1]) for kind, pairs in texts.items()}
    each = (time.perf_counter() - begun) / max(1, len(scored))
    rows = len(prompts)
    if each * len(scored) * rows > MAX_SECONDS:
        rows = max(2, int(MAX_SECONDS / (each * len(scored))))
    for kind, pairs in texts.items():
        scored[kind] += _graded(bench, pairs[1:rows])
    bench.answers = scored


def _texts(bench: Bench, prompts: Sequence[Prompt]) -> dict[str, list[tuple[Prompt, str]]]:
    texts = {"empty": [(prompt, "") for prompt in prompts]}
    try:
        gold = [bench.task.gold(prompt) for prompt in prompts]
    except Exception as error:  # noqa: BLE001 - a task may have no gold answers: reported in a line
        bench.no_gold = str(error) or type(error).__name__
        return texts
    others = [
        next((g for g in gold[n:] + gold[:n] if g != own), None) for n, own in enumerate(gold, 1)
    ]
    wrong = [(p, other) for p, other in zip(prompts, others, strict=True) if other is not None]
    return {"gold": list(zip(prompts, gold, strict=True)), "wrong": wrong, **texts}


def _graded(bench: Bench, pairs: Sequence[tuple[Prompt, str]]) -> list[Rollout]:
    """Texts as scored rollouts, with tokens, because a reward may count them."""
    rollouts = []
    for prompt, text in pairs:
        tokens = bench.template.encode_completion(text, bench.policy.end_tokens[0])
        completion = Turn(
            tokens=tokens, logprobs=(0.0,) * len(tokens), text=text, stop_reason="stop", version=0
        )
        rollouts.append(Rollout(prompt=prompt, turns=(completion,), group=0))
    scores = bench.scorer.score(rollouts)
    return [replace(r, score=score) for r, score in zip(rollouts, scores, strict=True)]


def scores(rollouts: Sequence[Rollout]) -> list[Score]:
    """The scores that did not break."""
    return [r.score for r in rollouts if r.score is not None and r.score.ok]


def valid(bench: Bench, kind: str) -> list[Rollout]:
    """Known answers of a kind whose grader did not break."""
    return [r for r in bench.answers.get(kind, ()) if r.score is not None and r.score.ok]


def mean(bench: Bench, kind: str, *, check: str = "") -> float | None:
    """Mean score of a kind, or of the reward ``check``; None where none could be scored."""
    found = scores(valid(bench, kind))
    values = [score.parts.get(check, 0.0) if check else score.value for score in found]
    return sum(values) / len(values) if values else None


def claims(bench: Bench) -> bool:
    """Whether a reward that is learned from reads the answer: only then can it know a right one.

    A scorer of whole batches is taken to read it.
    """
    rewards = bench.scorer.rewards if isinstance(bench.scorer, RewardScorer) else ()
    return not any(reward.weight for reward in rewards) or bool(readers(bench))


def readers(bench: Bench) -> list[BoundReward]:
    """The rewards learned from that read the answer: ``answer``, or a column that the check reads.

    So do the check itself, and the task's own rewards with a column, as its gold answers are right
    by them. Any other function judges something else, such as the form or a keyword.
    """
    rewards = bench.scorer.rewards if isinstance(bench.scorer, RewardScorer) else ()
    check = bench.setup.marks.check
    known = {check, *bench.task.rewards}
    columns = {name for reward in rewards if reward.name in known for name in reward.wanted}
    answer = {"answer", *columns} - {*FROM_ROLLOUT}
    learned = [reward for reward in rewards if reward.weight]
    return [r for r in learned if r.name == check or answer & {*r.wanted}]


def earned(bench: Bench, kind: str) -> dict[str, float]:
    """What known answers of a kind get from the rewards that read the answer, by prompt.

    From all rewards where none of them does.
    """
    by = readers(bench)
    return {
        r.prompt.id: sum(reward.weight * r.score.parts[reward.name] for reward in by)
        if by
        else r.score.value
        for r in valid(bench, kind)
        if r.score is not None
    }


def _right(bench: Bench, kind: str, *also: Marks) -> float | None:
    """Share of a kind that is right by the marks of the run or by ``also``; None if none scored."""
    found = valid(bench, kind)
    marks = (bench.setup.marks, *also)
    return sum(any(is_right(r, m) for m in marks) for r in found) / len(found) if found else None


def _earned(bench: Bench, kind: str) -> float | None:
    """Share of a kind that is right, or gets full marks from all that is learned from."""
    learned = replace(bench.setup.marks, check="")
    return _right(bench, kind, *(() if exceeding_one(bench.known, learned) else (learned,)))


def compare_answers(bench: Bench) -> Iterator[Verdict]:
    """Gold answers get full marks; those of other rows and empty ones do not.

    A reward that does not read the answer cannot know which is right, so nothing fails for it; nor
    where the environment scores.
    """
    marks, knows = bench.setup.marks, claims(bench)
    if bench.env_scores:
        beside = " and ".join(map(repr, marks.counted_rewards)) or "the task's rewards"
        text = f"the environment scores the episodes, not {beside}, which is only shown beside it"
        if not marks.weights:
            text = "the environment scores the episodes, and no reward stands beside it"
        yield Verdict("pass", text)
        return
    if not marks.counted_rewards:
        yield Verdict("pass", "nothing checks answers, and no reward has full marks")
        return
    for name, largest in exceeding_one(bench.known, marks).items():
        text, _, fix = how_to_declare(name, largest).partition(": ")
        yield Verdict("warn", text, fix, "full marks")
        return
    asked = bool(marks.check) or knows
    if not asked:
        text = "no reward reads the answer: none is right or wrong"
        yield Verdict("pass", text)
    elif bench.no_gold:
        text = f"none to try the rewards with: {bench.no_gold.partition(';')[0]}"
        yield Verdict("warn", text, "add an answer column, if there are answers")
    else:
        yield _gold(bench)
    empty, right = _earned(bench, "empty"), _right(bench, "empty") or 0.0
    if empty is not None:
        many = right > 0.5 or (empty > 0.5 and knows)
        yield Verdict(
            "fail" if many else "warn" if empty else "pass",
            f"{empty:.0%} get full marks",
            "fix the reward: saying nothing would be learned first",
            "empty answers",
        )
    wrong = _right(bench, "wrong")
    if wrong is not None and asked:
        yield Verdict(
            "warn" if wrong > 0.05 else "pass",
            f"{wrong:.0%} (those to another question) get full marks",
            "fix the reward, unless one answer may well fit many questions",
            "shuffled answers",
        )


def _gold(bench: Bench) -> Verdict:
    marks, share = bench.setup.marks, _right(bench, "gold")
    if share is None:
        return Verdict("fail", "none could be graded: see broken scores, below", "fix the reward")
    found, judges = valid(bench, "gold"), " and ".join(map(repr, marks.counted_rewards))
    text = f"{share:.0%} of {len(found)} get full marks from {judges}"
    if share == 1:
        return Verdict("pass", text)
    means = [mean(bench, kind, check=marks.check) for kind in ("wrong", "empty")]
    others = max((known for known in means if known is not None), default=None)
    gold = mean(bench, "gold", check=marks.check) or 0.0
    better = others is not None and gold > others
    fix = _mend(bench, share=share, judges=judges)
    if not fix and better and share == 0:
        text += f", though they score {gold:.2f} on average and others {others:.2f}"
        fix = "let the reward give 1 for full marks, or declare its maximum: accuracy counts those"
    first = next(rollout for rollout in found if not is_right(rollout, marks))
    parts = first.score.parts if first.score is not None else {}
    values = " and ".join(f"{parts.get(name, 0.0):g}" for name in marks.counted_rewards)
    said = printable(first.text, limit=60)
    # Nothing can be learned where gold answers score like the others; it can where they often get
    # full marks.
    return Verdict(
        "warn" if better else "fail",
        f'{text}; {first.prompt.id}: the gold answer is "{said}" and scores {values}',
        fix or "fix the answers, or let the reward read them where they stand",
    )


def _mend(bench: Bench, *, share: float, judges: str) -> str:
    """The fix that gives gold answers full marks: other answers, another ``extract``, or ""."""
    given = [str(r.prompt.columns.get("answer", "")) for r in bench.answers["gold"]]
    for how, (mark, mend) in _MARKED.items():
        if any(extract_answer(answer, how) is not None for answer in given):
            return f"the answers of the data carry {mark} themselves: {mend}"
    extract = _better_extract(bench, share)
    return f'set extract = "{extract}" for the reward {judges}, or fix the answers' * bool(extract)


def _better_extract(bench: Bench, most: float) -> str:
    """The option ``extract`` under which most gold answers get full marks; "" where none helps."""
    name, best = bench.setup.marks.check, ""
    function = REWARDS.get(name)
    if function is None:
        return ""
    choices = typing.get_args(typing.get_type_hints(function).get("extract"))
    given = bench.recipe.rewards.get(name) or bench.task.rewards.get(name, {})
    chosen = dict(given) if isinstance(given, Mapping) else {}
    for choice in choices if set(choices) == set(typing.get_args(Extract)) else ():
        scorer = RewardScorer({name: {**chosen, "weight": 1.0, "extract": choice}})
        found = scorer.score(bench.answers["gold"])
        share = sum(score.ok and score.value >= 1 for score in found) / len(found)
        if share > most:
            best, most = choice, share
    return best


def measure_answers(bench: Bench) -> Verdict | None:
    """Whether there is room for the gold answers, end token and all."""
    lengths = [len(rollout.tokens) for rollout in bench.answers.get("gold", ())]
    if not lengths:
        return None
    long = sum(length > bench.limit for length in lengths) / len(lengths)
    return Verdict(
        "warn" if long else "pass",  # only a warning: answers may be shorter than the gold ones
        f"gold answers have at most {max(lengths)} of {bench.limit} tokens"
        + (f"; {long:.0%} do not fit" if long else ""),
        "raise max_new_tokens, unless shorter answers can be right",
    )
