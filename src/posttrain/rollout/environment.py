"""An environment in the place of an engine's reply: what it says becomes a turn, or a score."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.envs.env_pool import EnvPool
from posttrain.envs.plain_answers import Failure, Plain, from_plain, to_plain
from posttrain.protocols import Answer, Env
from posttrain.rewards.bound import BoundReward, checked, fitting, usable
from posttrain.types import Observation, Prompt, Rollout, Sampling, Score, Turn, with_opening

Encode = Callable[[str | Sequence[Mapping[str, Any]], Turn], Sequence[int]]
"""The tokens of a text, or of messages, that follow this turn of the policy."""
Render = Callable[[Prompt], Prompt]
"""The prompt with the tokens that the policy reads."""
Kept = list[tuple[int, Plain]]
"""The answers of one sequence, each with a digest of the turn that it answers (0: the opening)."""
MARKS = {"score": -1, "counts": -2}  # in the place of a digest: what was asked at the end
_WHOLE = Score(value=0.0)
NOTHING_SCORES = (
    "the environment ended the episode without a score, and no reward has a weight; let it score "
    "(a method reward(), a number at the end), or give a reward"
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment as a run uses it: where it runs, how its words become tokens, its limits.

    ``render`` writes the prompts behind which the environment says something before the first turn.
    An episode is over after ``max_turns`` turns of the policy, and where its ``max_tokens`` leave
    no room for another turn; 0 is no limit. ``longest`` is the policy's context, ``vocabulary`` how
    many tokens it knows. One that is ``alone`` has no rewards beside it: what it does not score is
    broken.
    """

    pool: EnvPool
    encode: Encode
    render: Render | None = None
    max_turns: int = 0
    max_tokens: int = 0
    longest: int | None = None
    vocabulary: int | None = None
    alone: bool = False

    def close(self) -> None:
        """End its workers."""
        self.pool.shutdown()


@contextlib.contextmanager
def using(env: Env | Environment | None, encode: Encode | None) -> Iterator[Environment | None]:
    """An environment as a run uses it; one that is only an object runs in this process."""
    if env is None or isinstance(env, Environment):
        yield env
        return
    with contextlib.closing(
        Environment(pool=EnvPool(env, workers=0), encode=encode or _no_tokens)
    ) as made:
        yield made


def _no_tokens(said: object, turn: Turn) -> Sequence[int]:
    raise ValueError("no tokenizer for an environment that says text; give collect_scored encode=")


class Conversations:
    """The conversations of one call of an engine, each with a state of its own.

    Text and messages become tokens by the environment's ``encode``; tokens are taken as they are,
    and what was sampled is never encoded. Where it raised, hung, or said nothing that can be read,
    the score of that sequence is broken. ``kept`` are answers to the same call, by sequence: they
    are given again, as long as the turns are the same.
    """

    def __init__(self, env: Environment, *, kept: Mapping[int, Kept] | None = None) -> None:
        self.scores: dict[int, Score] = {}
        """The scores with which the environment ended sequences, by their number."""
        self.errors: Counter[str] = Counter()
        """How many sequences an environment broke, by kind; ``counts``: could not count, only."""
        self.kept: dict[int, Kept] = {number: list(said) for number, said in (kept or {}).items()}
        self._env, self._pool = env, env.pool
        self._opens = "opening" in env.pool.methods
        self._judge = BoundReward(name="env", weight=1.0, function=float)  # for its words
        self._episodes: dict[int, int] = {}
        self._prompts: list[Prompt] = []  # as they were before an opening
        self._earned: dict[int, float] = {}
        self._limits: dict[int, Literal["", "max_turns", "max_tokens"]] = {}
        self._parts: dict[int, Mapping[str, float]] = {}
        self._given: Counter[int] = Counter()
        self._worth: set[int] = set()  # what was earned is all that they are worth
        self._seed, self._room = 0, 0
        self._begun, self._waited = time.perf_counter(), 0.0
        self._last: dict[int, float] = {}

    def begin(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int, seed: int
    ) -> list[Prompt] | None:
        """Begin a call of the engine; the prompt of each sequence, where the environment opens."""
        self._seed, self._room = seed, sampling.max_new_tokens
        self._begun = time.perf_counter()
        if not self._opens:
            return None
        self._prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        missing = [number for number in range(len(self._prompts)) if not self.kept.get(number)]
        asked = {number: self._pool.opening(self._episode(number)) for number in missing}
        for number, future in asked.items():
            self.kept[number] = [(0, to_plain(future.result()))]
        return [self._opened(number) for number in range(len(self._prompts))]

    def __call__(self, rollout: Rollout, number: int) -> Turn | Future[Turn | None] | None:
        """What the environment answers to the last turn of a sequence; None where it ends it."""
        if number in self.scores:
            return None  # it broke before the first turn
        turn, kept = rollout.turns[-1], self.kept.setdefault(number, [])
        digest = zlib.crc32(array("q", turn.tokens))
        place = self._opens + sum(each.sampled for each in rollout.turns) - 1
        if place < len(kept) and kept[place][0] == digest:
            return self._read(rollout, number, answer=from_plain(kept[place][1]))
        del kept[place:]  # they answer other turns
        asked = self._pool.ask(self._episode(number, rollout), turn)
        begun = time.perf_counter()

        def done(_: object) -> None:
            self._last[number] = time.perf_counter()
            self._waited += self._last[number] - begun

        def take(answer: Answer | Failure) -> Turn | None:
            kept.append((digest, to_plain(answer)))
            return self._read(rollout, number, answer=answer)

        asked.add_done_callback(done)
        return _Later(asked, take)

    def end(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts of the call; those that a limit ended are scored as they stand."""
        ended = []
        for number, rollout in enumerate(rollouts):
            read = sum(not turn.sampled for turn in rollout.turns)
            # A reply that was given and not read: the policy's context had no room for it.
            limit = "max_tokens" if self._given[number] > read else self._limits.get(number, "")
            ended.append(replace(rollout, limit=limit))
        cut = {n: r for n, r in enumerate(ended) if r.limit and n not in self.scores}
        if "score" not in self._pool.methods:
            self._worth |= cut.keys()  # nothing more than it has given so far
        for number, answer in self._about("score", cut).items():
            self._end_with(ended[number], number, answer=answer)
        whole = {n: r for n, r in enumerate(ended) if self.scores.get(n, _WHOLE).ok}
        for number, found in self._about("counts", whole).items():
            if isinstance(found, Score):
                self._parts[number] = found.parts
            else:
                self.errors["counts"] += 1
        return ended

    def _about(
        self, kind: Literal["score", "counts"], asked: Mapping[int, Rollout]
    ) -> dict[int, Answer | Failure]:
        """What the environment says of episodes that are over, where it has such a method."""
        if kind not in self._pool.methods:
            return {}
        found: dict[int, Answer | Failure] = {}
        futures = {}
        for number, rollout in asked.items():
            known = [said for mark, said in self.kept.get(number, []) if mark == MARKS[kind]]
            if known:
                found[number] = from_plain(known[0])
            else:
                futures[number] = self._pool.about(self._episode(number, rollout), kind)
        for number, future in futures.items():
            found[number] = future.result()
            self.kept.setdefault(number, []).append((MARKS[kind], to_plain(found[number])))
        return found

    def scored(self, number: int, graded: Score) -> Score:
        """The score of a sequence, of which the rewards say ``graded``."""
        given, earned = self.scores.get(number), self._earned.get(number, 0.0)
        if given is None and self._env.alone:
            broken = Score(value=0.0, state="invalid", reason=NOTHING_SCORES)
            given = with_earned(_WHOLE, earned) if number in self._worth else broken
        score = with_earned(graded, earned) if given is None else over(graded, given)
        counted = {f"env/{name}": value for name, value in self._parts.get(number, {}).items()}
        return replace(score, parts={**score.parts, **counted}) if counted else score

    def counts(self) -> dict[str, float]:
        """What there is to say of the call: errors by kind, restarts, seconds, all to be summed."""
        restarts, failures = self._pool.news()
        counts = {f"errors/{kind}": float(number) for kind, number in self.errors.items()}
        if failures:
            counts["errors/close"] = float(failures)
        alive = sum(last - self._begun for last in self._last.values())
        return {**counts, "restarts": float(restarts), "waited": self._waited, "alive": alive}

    def close(self) -> None:
        """Every episode is over, however it ended."""
        while self._episodes:
            self._pool.close(self._episodes.popitem()[1])

    def _episode(self, number: int, rollout: Rollout | None = None) -> int:
        """The episode of a sequence; one of which answers are kept begins with them."""
        if number not in self._episodes:
            prompt = self._prompts[number] if self._prompts or rollout is None else rollout.prompt
            turns = [] if rollout is None else [turn for turn in rollout.turns if turn.sampled]
            said = [answer for _, answer in self.kept.get(number, [])]
            asked = ([None] if self._opens else []) + turns
            self._episodes[number] = self._pool.open(
                prompt,
                seed=episode_seed(self._seed, number),
                history=list(zip(asked, said, strict=False)),
            )
        return self._episodes[number]

    def _opened(self, number: int) -> Prompt:
        """The prompt with what the environment says behind it."""
        prompt, said = self._prompts[number], from_plain(self.kept[number][0][1])
        if said is None or said == "":
            return prompt
        if not isinstance(said, Failure | str):
            reason = f"opened with a {type(said).__name__}, not with text"
            said = Failure(kind="unreadable", reason=reason)
        if isinstance(said, Failure):
            self._broken(number, said)
            return prompt
        if self._env.render is None:
            raise ValueError("no template for an environment with an opening; give render=")
        opened = with_opening(prompt, said)
        try:
            opened = replace(opened, tokens=self._env.render(opened).tokens)
        except ValueError as error:  # of a chat template, say
            reason = f"opened with what cannot be read: ValueError: {error}"
            self._broken(number, Failure(kind="unreadable", reason=reason))
            return prompt
        longest = self._env.longest
        if longest is not None and len(opened.tokens) + self._room > longest:
            reason = f"opened with a text that leaves no room in the context of {longest} tokens"
            self._broken(number, Failure(kind="too_long", reason=reason))
            return prompt
        return opened

    def _read(self, rollout: Rollout, number: int, *, answer: Answer | Failure) -> Turn | None:
        earned = self._earned[number] = sum(turn.reward for turn in rollout.turns)
        if isinstance(answer, Observation):
            self._worth.add(number)
        if isinstance(answer, Observation | str | list | tuple):
            try:
                turn = self._turn(answer, to=rollout.turns[-1])
            except Exception as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
                reason = f"said what cannot be read: {type(error).__name__}: {error}"
                self._broken(number, Failure(kind="unreadable", reason=reason))
                return None
            return self._within(rollout, number, turn=turn, earned=earned + turn.reward)
        self._end_with(rollout, number, answer=answer)
        return None

    def _end_with(self, rollout: Rollout, number: int, *, answer: Answer | Failure) -> None:
        if isinstance(answer, Failure):
            self._broken(number, answer)
        elif answer is not None:
            score = fitting(self._judge, checked(self._judge, answer), rollout=rollout)
            self.errors["reported"] += isinstance(answer, Score) and not answer.ok
            self.errors["unreadable"] += not score.ok and not isinstance(answer, Score)
            self.errors = +self.errors  # no zeros
            self.scores[number] = with_earned(score, self._earned[number])

    def _within(self, rollout: Rollout, number: int, *, turn: Turn, earned: float) -> Turn | None:
        """The reply, unless a limit has ended the episode."""
        self._earned[number] = earned
        turns = sum(each.sampled for each in rollout.turns)
        tokens = len(rollout.tokens) + len(turn.tokens) + self._room
        if self._env.max_turns and turns >= self._env.max_turns:
            self._limits[number] = "max_turns"
        elif self._env.max_tokens and tokens > self._env.max_tokens:
            self._limits[number] = "max_tokens"
        else:
            self._given[number] = sum(not each.sampled for each in rollout.turns) + 1
            return turn
        return None

    def _broken(self, number: int, failure: Failure) -> None:
        self.errors[failure.kind] += 1
        reason = f"the environment {failure.reason}"
        self.scores[number] = Score(
            value=0.0, state=failure.state, reason=reason, details=failure.details
        )

    def _turn(self, answer: Any, *, to: Turn) -> Turn:
        if isinstance(answer, Observation):
            return rewarded(self._turn(answer.content, to=to), answer, of=to)
        if isinstance(answer, str):
            return Turn(tokens=tuple(self._env.encode(answer, to)), text=answer)
        if all(isinstance(each, int) for each in answer):
            known = self._env.vocabulary or max(answer) + 1
            if strange := [each for each in answer if not 0 <= each < known]:
                raise ValueError(f"token {strange[0]}, and the policy knows 0 to {known - 1}")
            return Turn(tokens=tuple(answer), text="")
        text = "\n".join(message["content"] for message in answer)
        return Turn(tokens=tuple(self._env.encode(answer, to)), text=text)


def episode_seed(seed: int, number: int) -> int:
    """The seed of what the environment draws in a sequence: neighbours have nothing in common.

    >>> episode_seed(0, 0), episode_seed(0, 1)
    (1735201683, 3278692055)
    """
    mixed = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(mixed, "big")


class _Later(Future[Turn | None]):
    """The turn that an answer becomes, made by who asks for it: a tokenizer is no thread's own."""

    def __init__(
        self, asked: Future[Answer | Failure], take: Callable[[Answer | Failure], Turn | None]
    ) -> None:
        super().__init__()
        self._asked, self._take = asked, take
        self._made: list[Turn | None] = []
        asked.add_done_callback(lambda _: self.set_result(None))

    def result(self, timeout: float | None = None) -> Turn | None:
        """The environment's turn, or None; waits for the answer."""
        if not self._made:
            self._made.append(self._take(self._asked.result(timeout)))
        return self._made[0]


def talking(env: Environment | None) -> Conversations | None:
    """What replies in one call of an engine: a new conversation for each sequence, or nothing."""
    return None if env is None else Conversations(env)


def rewarded(reply: Turn, said: Observation, *, of: Turn) -> Turn:
    """A reply with what it gives to the policy's turn before it: a number, or one for each token.

    >>> turn = Turn(tokens=(5, 6), text="56", logprobs=(-1.0, -1.0))
    >>> said = Observation("no", reward=[0.5, -1.0])
    >>> rewarded(Turn(tokens=(9,), text="no"), said, of=turn).reward
    -0.5
    """
    if isinstance(said.reward, Sequence):
        each = tuple(usable(value) for value in said.reward)
        if len(each) != len(of.tokens):
            raise ValueError(
                f"reward: {len(each)} numbers for a turn of {len(of.tokens)} tokens; give one for "
                "each token, or one number for the turn"
            )
        return replace(reply, reward=math.fsum(each), token_rewards=each)
    return replace(reply, reward=usable(said.reward))


def with_earned(score: Score, earned: float) -> Score:
    """The score of the end, with what was earned before it, also as its part ``earned``.

    A broken score stays as it is, and so does one where nothing was earned.

    >>> with_earned(Score(value=1.0), -0.25)
    Score(value=0.75, state='ok', parts={'earned': -0.25}, reason='', details='', seconds=0.0,
          token_rewards=())
    """
    if not score.ok or not earned:
        return score
    return replace(score, value=score.value + earned, parts={**score.parts, "earned": earned})


def over(graded: Score, given: Score) -> Score:
    """The score that an environment has ``given``; what the rewards said is kept in its parts.

    >>> score = over(Score(value=0.0, parts={"exact": 0.0}), Score(value=0.5))
    >>> score.value, score.parts
    (0.5, {'exact': 0.0, 'env': 0.5})
    """
    parts = {f"env/{name}": value for name, value in given.parts.items()}
    parts |= {"env": given.value} if given.ok else {}
    return replace(given, parts={**graded.parts, **parts}, seconds=graded.seconds)
