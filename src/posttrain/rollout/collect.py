"""From prompts to the scored rollouts of a step, with the exact tokens the engine drew."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from posttrain.protocols import Engine, Env, Reply, Scorer
from posttrain.rollout.environment import Conversations, Encode, Environment, using
from posttrain.rollout.kept_replies import KeptReplies, digest_of
from posttrain.rollout.prompt_order import PromptOrder
from posttrain.types import Collected, Prompt, Rollout, Sampling, draw_seed


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    reply: Reply | None = None,
) -> list[Rollout]:
    """``num_samples`` unscored rollouts of each prompt; a group is a prompt's place in the list.

    The rollouts of a prompt stand together, in the order of the prompts.

    >>> from posttrain.rollout.engines.scripted import ScriptedEngine
    >>> engine = ScriptedEngine({"2+3=": ["5", "6"]})
    >>> prompts = [Prompt(id="train-0", text="2+3=")]
    >>> rollouts = collect(engine, prompts, sampling=Sampling(), num_samples=2, seed=0)
    >>> [(rollout.group, rollout.text) for rollout in rollouts]
    [(0, '5'), (0, '6')]
    """
    # An engine of a user's own that knows no turns still serves where no environment replies.
    replying: dict[str, Any] = {} if reply is None else {"reply": reply}
    if reply is not None and not takes(engine, "reply"):
        raise ValueError(
            f"engine {type(engine).__name__}: its generate has no parameter reply, by which an "
            "environment (task.env) answers; docs/engines.md shows a whole engine"
        )
    if isinstance(reply, Conversations):
        with contextlib.closing(reply):
            asked: dict[str, Any] = {"sampling": sampling, "num_samples": num_samples, "seed": seed}
            opened = reply.begin(prompts, **asked)
            if opened is None:
                return reply.end(_generated(engine, prompts, **asked, **replying))
            # A prompt for each sequence: its number, and so what it draws, is the same.
            found = _generated(engine, opened, **{**asked, "num_samples": 1}, **replying)
            return reply.end([replace(r, group=r.group // num_samples) for r in found])
    return _generated(
        engine, prompts, sampling=sampling, num_samples=num_samples, seed=seed, **replying
    )


def _generated(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    **replying: Any,
) -> list[Rollout]:
    answers = engine.generate(prompts, sampling, num_samples=num_samples, seed=seed, **replying)
    counts = [len(rollouts) for rollouts in answers]
    if counts != [num_samples] * len(prompts):
        raise ValueError(
            f"engine {type(engine).__name__}: asked for {num_samples} completions of each of "
            f"{len(prompts)} prompts, got {counts}; an engine answers every prompt, in order"
        )
    return [
        replace(rollout, prompt=prompt, group=group)
        for group, (prompt, rollouts) in enumerate(zip(prompts, answers, strict=True))
        for rollout in rollouts
    ]


def takes(engine: Engine, name: str) -> bool:
    """Whether the ``generate`` of an engine has this parameter."""
    parameters = inspect.signature(engine.generate).parameters.values()
    return any(each.name == name or each.kind == each.VAR_KEYWORD for each in parameters)


def collect_scored(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    engine: Engine,
    scorer: Scorer,
    num_samples: int,
    seed: int,
    greedy: bool = False,
    env: Env | Environment | None = None,
    encode: Encode | None = None,
    replies: KeptReplies | None = None,
    call: int = 0,
) -> Collected:
    """Sample and score: the one way to do so, of training, evaluation, preferences and checks.

    With ``greedy`` every prompt is also answered greedily, by the same weights and as long as
    others may be, and its rollouts carry that answer with its score. All are scored in one call, so
    that graders in processes have them at once. An ``env`` answers the policy's turns, its text in
    the tokens that ``encode`` gives, and where it ends a rollout with a score, that one counts.
    ``replies`` keeps what it says in call number ``call``, or has kept it.
    """
    begun = time.perf_counter()
    asked = [(sampling, num_samples)]
    if greedy:
        asked.append((replace(sampling, temperature=0.0, top_k=0, top_p=1.0), 1))
    rollouts: list[Rollout] = []
    talked: list[tuple[Conversations, int] | None] = []
    counts: Counter[str] = Counter()
    with using(env, encode) as environment:
        digest = digest_of(prompts, num_samples=num_samples, seed=seed)
        kept = [] if replies is None else replies.known(call, digest)
        said = []
        for place, (drawn, samples) in enumerate(asked):
            known = kept[place] if place < len(kept) else None
            talks = None if environment is None else Conversations(environment, kept=known)
            found = collect(
                engine, prompts, sampling=drawn, num_samples=samples, seed=seed, reply=talks
            )
            talked += [None if talks is None else (talks, n) for n in range(len(found))]
            rollouts += found
            if talks is not None:
                counts.update(talks.counts())
                said.append(talks.kept)
        if replies is not None and said:
            replies.keep(call, digest, said=said)
    sampled = time.perf_counter()
    graded = scorer.score(rollouts)
    scored = [
        replace(rollout, score=score if heard is None else heard[0].scored(heard[1], score))
        for rollout, heard, score in zip(rollouts, talked, graded, strict=True)
    ]
    count = len(prompts) * num_samples
    baselines = {rollout.group: rollout for rollout in scored[count:]}
    return Collected(
        rollouts=[replace(r, greedy=baselines.get(r.group)) for r in scored[:count]],
        seconds={"rollout": sampled - begun, "reward": time.perf_counter() - sampled},
        env=dict(counts),
    )


def by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each prompt."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


class RolloutSource:
    """Yields scored rollouts, one step's worth at a time, sampled when they are asked for.

    With ``max_resamples > 0``, groups in which all rewards agree are thrown back and new prompts
    are sampled in their place (DAPO's dynamic sampling), at most that many times a step: as many as
    should bring what is missing, by the step's share of groups with signal so far. What is still
    missing in the end is filled with groups that agree, so that a step always has its full size.

    With ``greedy`` every prompt is also answered greedily, by the same weights, and its rollouts
    carry that answer with its score: the baseline of advantages that need it. ``env``, ``encode``
    and ``replies`` are those of :func:`collect_scored`.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        *,
        prompts: PromptOrder,
        sampling: Sampling,
        prompts_per_step: int,
        group_size: int,
        seed: int,
        max_resamples: int = 0,
        greedy: bool = False,
        env: Env | Environment | None = None,
        encode: Encode | None = None,
        replies: KeptReplies | None = None,
    ) -> None:
        self.prompts = prompts
        self.num_calls = 0
        """Calls of the engine so far: each has a seed of its own."""
        self.unfinished: tuple[Collected, ...] = ()
        """Batches whose rollouts go on: none, but in :mod:`posttrain.rollout.partial`."""
        self._engine = engine
        self._scorer = scorer
        self._sampling = sampling
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._seed = seed
        self._max_resamples = max_resamples
        self._greedy = greedy
        self._env, self._encode, self._replies = env, encode, replies

    def steps(self, count: int) -> Iterator[Collected]:
        """The rollouts of ``count`` steps."""
        for _ in range(count):
            yield self.collect()

    def collect(self) -> Collected:
        """One step's rollouts, groups numbered from 0."""
        seconds = {"rollout": 0.0, "reward": 0.0}
        counts: Counter[str] = Counter()
        kept: list[list[Rollout]] = []
        spare: list[list[Rollout]] = []
        for _ in range(self._max_resamples + 1):
            asked = next_draw(self._prompts_per_step, kept=len(kept), spare=len(spare))
            for group in self._sample(asked, seconds, counts=counts):
                useful = self._max_resamples == 0 or has_signal(group)
                (kept if useful else spare).append(group)
            if len(kept) >= self._prompts_per_step:
                break
        filled = [*kept, *spare][: self._prompts_per_step]
        rollouts = [
            _numbered(rollout, number) for number, group in enumerate(filled) for rollout in group
        ]
        return Collected(
            rollouts=rollouts,
            seconds=seconds,
            env=dict(counts),
            resampled=len(kept) + len(spare) - self._prompts_per_step,
            position=self.prompts.position,
            num_calls=self.num_calls,
        )

    def _sample(
        self, count: int, seconds: dict[str, float], *, counts: Counter[str]
    ) -> list[list[Rollout]]:
        found = collect_scored(
            self.prompts.take(count),
            self._sampling,
            engine=self._engine,
            scorer=self._scorer,
            num_samples=self._group_size,
            seed=draw_seed(self._seed, self.num_calls),
            greedy=self._greedy,
            env=self._env,
            encode=self._encode,
            replies=self._replies,
            call=self.num_calls,
        )
        self.num_calls += 1
        counts.update(found.env)
        for name, taken in found.seconds.items():
            seconds[name] += taken
        groups = by_group(found.rollouts)
        self.prompts.observe(groups)
        return groups


def next_draw(wanted: int, *, kept: int, spare: int) -> int:
    """How many prompts to sample next, until ``wanted`` groups are kept: at most as many at once.

    Those that are missing, over the share of groups that were kept so far; few large draws instead
    of many small ones, which would each wait for their longest completion.

    >>> next_draw(64, kept=0, spare=0), next_draw(64, kept=48, spare=16)
    (64, 22)
    """
    missing = wanted - kept
    return min(wanted, -(-missing * (kept + spare) // kept)) if kept else wanted


def _numbered(rollout: Rollout, group: int) -> Rollout:
    if rollout.group == group:
        return rollout
    greedy = rollout.greedy and replace(rollout.greedy, group=group)
    return replace(rollout, group=group, greedy=greedy)


def has_signal(group: Sequence[Rollout]) -> bool:
    """Whether the valid scores of a group, and its greedy one's, differ: only then it teaches."""
    scores = [rollout.score for rollout in group]
    scores += [rollout.greedy.score for rollout in group if rollout.greedy is not None]
    return len({score.value for score in scores if score is not None and score.ok}) > 1
