"""Answers whose worth is known (right, someone else's, none at all) under the recipe's rewards."""

from __future__ import annotations

import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.check.bench import Bench
from posttrain.rewards import REWARDS
from posttrain.rewards.extraction import Extract, extract_answer
from posttrain.rewards.scorer import FROM_ROLLOUT, RewardScorer
from posttrain.types import Completion, Prompt, Rollout
from posttrain.types.marks import Marks, above_one, is_right

ROWS, FAST_ROWS = 16, 8
MAX_SECONDS = 15.0  # what grading known answers may take in all
# An answer is compared as it stands: with a mark in it, only a copy of the whole text can be right.
_MARKED: dict[Extract, tuple[str, str]] = {
    "hashes": ("####", "put only what follows it there, or use the task gsm8k"),
    "boxed": ("\\boxed", "put only what it holds there"),
    "tag": ("<answer>", "put only what it holds there"),
}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Scored rollouts by kind: ``gold``, ``wrong`` (the gold of another row) and ``empty``."""

    marks: Marks
    scored: dict[str, list[Rollout]] = field(default_factory=dict)
    no_gold: str = ""
    """Why there are no gold answers, where there are none."""
    claims: bool = True
    """Whether a reward that is learned from reads the data: only then can it know an answer."""

    @property
    def judges(self) -> str:
        """The rewards that full marks are of, in words."""
        return " and ".join(map(repr, self.marks.judged))

    @property
    def everything(self) -> list[Rollout]:
        """All of them."""
        return [rollout for rollouts in self.scored.values() for rollout in rollouts]

    def valid(self, kind: str) -> list[Rollout]:
        """Those of a kind whose grader did not break."""
        return [r for r in self.scored.get(kind, []) if r.score is not None and r.score.ok]

    def mean(self, kind: str) -> float | None:
        """Mean value of a kind; None where none could be scored."""
        values = [r.score.value for r in self.valid(kind) if r.score is not None]
        return sum(values) / len(values) if values else None

    def decided(self, kind: str) -> float | None:
        """Mean of the check of answers over a kind, or without one of the value."""
        scores = [r.score for r in self.valid(kind) if r.score is not None]
        if not self.marks.check or not scores:
            return self.mean(kind)
        return sum(score.parts.get(self.marks.check, 0.0) for score in scores) / len(scores)

    def right(self, kind: str) -> float | None:
        """Share of a kind with full marks; None where none could be scored."""
        valid = self.valid(kind)
        return sum(is_right(r, self.marks) for r in valid) / len(valid) if valid else None

    def earned(self, kind: str) -> float | None:
        """Share of a kind that is right, or gets full marks from all that is learned from."""
        learned = replace(self.marks, check="")
        valid = self.valid(kind)
        if not valid or above_one(self.everything, learned):
            return self.right(kind)
        full = [is_right(r, self.marks) or is_right(r, learned) for r in valid]
        return sum(full) / len(valid)


def grade_answers(bench: Bench) -> Answers:
    """Grade known answers to a few train prompts; fewer of them where grading is slow."""
    prompts = bench.some_prompts(FAST_ROWS if bench.fast else ROWS)
    texts, no_gold = _texts(bench, prompts)
    begun = time.perf_counter()
    scored = {kind: _graded(bench, pairs[:1]) for kind, pairs in texts.items()}
    each = (time.perf_counter() - begun) / max(1, len(scored))
    rows = len(prompts)
    if each * len(scored) * rows > MAX_SECONDS:
        rows = max(2, int(MAX_SECONDS / (each * len(scored))))
    for kind, pairs in texts.items():
        scored[kind] += _graded(bench, pairs[1:rows])
    return Answers(
        marks=bench.of_parts().marks, scored=scored, no_gold=no_gold, claims=_claims(bench)
    )


def _claims(bench: Bench) -> bool:
    """A function of the completion alone judges its form, unless it is declared to check answers.

    One that reads a column of the data may know them. What a scorer of whole batches reads is not
    known: it is taken at its word.
    """
    parts = bench.of_parts()
    rewards = parts.scorer.rewards if isinstance(parts.scorer, RewardScorer) else ()
    learned = [reward for reward in rewards if reward.weight]
    checks = any(reward.name == parts.marks.check for reward in learned)
    read = [name for reward in learned for name in reward.wanted]
    return not learned or checks or any(name not in FROM_ROLLOUT for name in read)


def mend_gold(bench: Bench, answers: Answers) -> str:
    """What lets gold answers get full marks: other answers, or another ``extract``; else ""."""
    given = [str(r.prompt.columns.get("answer", "")) for r in answers.scored["gold"]]
    for how, (mark, mend) in _MARKED.items():
        if any(extract_answer(answer, how) is not None for answer in given):
            return f"the answers of the data carry {mark} themselves: {mend}"
    extract = _better_extract(bench, answers)
    if not extract:
        return ""
    return f'set extract = "{extract}" for the reward {answers.judges}, or mend the answers'


def _better_extract(bench: Bench, answers: Answers) -> str:
    """The option ``extract`` under which most gold answers get full marks; "" where none helps."""
    name, task = answers.marks.check, bench.task
    function = REWARDS.get(name)
    if function is None or task is None:
        return ""
    choices = typing.get_args(typing.get_type_hints(function).get("extract"))
    given = bench.recipe.rewards.get(name) or task.rewards.get(name, {})
    chosen = dict(given) if isinstance(given, Mapping) else {}
    best, most = "", answers.right("gold") or 0.0
    for choice in choices if set(choices) == set(typing.get_args(Extract)) else ():
        scorer = RewardScorer({name: {**chosen, "weight": 1.0, "extract": choice}})
        scores = scorer.score(answers.scored["gold"])
        share = sum(score.ok and score.value >= 1 for score in scores) / len(scores)
        if share > most:
            best, most = choice, share
    return best


def _texts(
    bench: Bench, prompts: Sequence[Prompt]
) -> tuple[dict[str, list[tuple[Prompt, str]]], str]:
    assert bench.task is not None
    texts = {"empty": [(prompt, "") for prompt in prompts]}
    try:
        gold = [bench.task.gold(prompt) for prompt in prompts]
    except Exception as error:  # noqa: BLE001 - a task may have none: it is said in a line
        return texts, str(error) or type(error).__name__
    others = [
        next((g for g in gold[n:] + gold[:n] if g != own), None) for n, own in enumerate(gold, 1)
    ]
    wrong = [(p, other) for p, other in zip(prompts, others, strict=True) if other is not None]
    return {"gold": list(zip(prompts, gold, strict=True)), "wrong": wrong, **texts}, ""


def _graded(bench: Bench, pairs: Sequence[tuple[Prompt, str]]) -> list[Rollout]:
    parts = bench.of_parts()
    assert parts.scorer is not None
    rollouts = [_rollout(bench, prompt, text=text) for prompt, text in pairs]
    scores = parts.scorer.score(rollouts)
    return [replace(r, score=score) for r, score in zip(rollouts, scores, strict=True)]


def _rollout(bench: Bench, prompt: Prompt, *, text: str) -> Rollout:
    """A text as if the model had written it: a reward may count its tokens."""
    template, end = bench.of_parts().template, bench.of_policy().end_tokens[0]
    tokens = template.encode_completion(text, end)
    completion = Completion(
        tokens=tokens, logprobs=(0.0,) * len(tokens), text=text, stop_reason="stop", version=0
    )
    return Rollout(prompt=prompt, completion=completion, group=0)
