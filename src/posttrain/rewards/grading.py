"""Running the rewards of a recipe on samples, one after another, in this process.

A sample is the data of a rollout that the rewards take, by name. The result is each reward's own
score, in order; one that does not apply has none. A broken score ends the list, unless its reward
is only monitored.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.rewards.bound import UNHEARD, BoundReward, broken, checked, raised
from posttrain.rewards.sample_data import FROM_ROLLOUT, FROM_TRL
from posttrain.types import Score

Sample = Mapping[str, Any]
Results = list[tuple[str, Score]]
Started = Callable[[int, int], None]
"""Called with the number of the sample and of the reward that is about to run."""
Done = Callable[[int, Results], None]

WHOLE_CHUNK = -1  # instead of a sample's index, while a batched reward grades the whole chunk
CONCURRENT = 32  # concurrent calls of an async reward
_Passes = tuple[type[BaseException], ...]


def grade(
    rewards: Sequence[BoundReward],
    samples: Sequence[Sample],
    *,
    started: Started = lambda sample, reward: None,
    done: Done | None = None,
    seconds: float | None = None,
    without: Collection[int] = (),
    in_worker: bool = False,
) -> list[Results]:
    """The scores of every sample; ``seconds`` is the limit of one call of an async reward.

    The rewards of which ``without`` has the numbers are left out. Whatever a reward raises makes
    its score broken. A ``KeyboardInterrupt`` is the user's and passes through, but not
    ``in_worker``: there the reward itself raised it.
    """
    passes: _Passes = () if in_worker else (KeyboardInterrupt,)
    ahead: dict[str, list[Score | None]] = {}
    asked = [(number, reward) for number, reward in enumerate(rewards) if number not in without]
    for number, reward in asked:
        if reward.kind == "batched":
            started(WHOLE_CHUNK, number)
            ahead[reward.name] = _batched(reward, samples, passes=passes)
        elif reward.kind == "async":
            turns = functools.partial(started, WHOLE_CHUNK, number)
            calls = _awaited(reward, samples, turns=turns, seconds=seconds, passes=passes)
            ahead[reward.name] = asyncio.run(calls)
    everything: list[Results] = []
    for index, sample in enumerate(samples):
        results: Results = []
        for number, reward in asked:
            known = ahead.get(reward.name)
            if known is None:
                started(index, number)
            score = _single(reward, sample, passes=passes) if known is None else known[index]
            if score is None:
                continue
            results.append((reward.name, score))
            if not score.ok and not reward.monitored:
                break
        everything.append(results)
        if done is not None:
            done(index, results)
    return everything


def _single(reward: BoundReward, sample: Sample, *, passes: _Passes) -> Score:
    begun = time.perf_counter()
    try:
        score = checked(reward, _call(reward, sample))
    except passes:
        raise
    except BaseException as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
        score = raised(reward, error)
    return replace(score, seconds=time.perf_counter() - begun)


def _call(reward: BoundReward, sample: Sample) -> Any:
    assert callable(reward.function), "scorers are asked about the whole batch"
    return reward.function(**_data(reward, sample))


def _data(reward: BoundReward, sample: Sample) -> dict[str, Any]:
    missing = [n for n in reward.wanted if n not in sample and n not in reward.optional]
    if missing:
        raise KeyError(f"this prompt has no column {missing[0]!r}")
    # What is passed to **kwargs: all there is, in the words of its own signature.
    others = FROM_ROLLOUT if reward.trl else FROM_TRL
    wanted = [name for name in sample if name not in others] if reward.every else reward.wanted
    return {name: sample[name] for name in wanted if name in sample}


def _batched(
    reward: BoundReward, samples: Sequence[Sample], *, passes: _Passes
) -> list[Score | None]:
    """One call for all samples; where it raises, one for each, to find the sample that fails."""
    begun = time.perf_counter()
    try:
        rows = [_data(reward, sample) for sample in samples]
        names = [name for name in rows[0] if all(name in row for row in rows)]
        if reward.every:  # a column that some prompts lack is None there, as in TRL
            names = list(dict.fromkeys(name for row in rows for name in row))
        assert callable(reward.function)
        lists: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        returned = reward.function(**lists, **_unheard(reward))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_whole(returned))
        if hasattr(returned, "tolist"):  # an array of numpy or a tensor
            returned = returned.tolist()
    except passes:
        raise
    except BaseException as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
        fault = raised(reward, error)
        if len(samples) > 1:
            alone = [_batched(reward, [sample], passes=passes) for sample in samples]
            return [score for scores in alone for score in scores]
        return [fault]
    share = (time.perf_counter() - begun) / len(samples)
    if not isinstance(returned, Sequence) or len(returned) != len(samples):
        what = type(returned).__name__
        what += f" of {len(returned)}" if isinstance(returned, Sequence) else ""
        wanted = f"a list of {len(samples)}, one score for each completion"
        wrong = broken(reward, f"returned {what}; expected {wanted}")
        return [replace(wrong, seconds=share)] * len(samples)
    return [  # None is that of TRL's signature: the reward does not apply
        None if value is None and reward.trl else replace(checked(reward, value), seconds=share)
        for value in returned
    ]


async def _whole(returned: Awaitable[Any]) -> Any:
    return await returned


def _unheard(reward: BoundReward) -> dict[str, Any]:
    """What TRL passes beside the data: a state that nobody has here, and loggers nobody reads."""
    if not reward.trl:
        return {}
    known: dict[str, Any] = {name: lambda *given: None for name in UNHEARD}
    known["trainer_state"] = None
    taken = inspect.signature(reward.function).parameters  # type: ignore[arg-type]
    return {name: value for name, value in known.items() if reward.every or name in taken}


async def _awaited(
    reward: BoundReward,
    samples: Sequence[Sample],
    *,
    turns: Callable[[], None],
    seconds: float | None,
    passes: _Passes,
) -> list[Score | None]:
    """Concurrent calls; ``turns`` ticks while the event loop runs, so that a blocked loop shows."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(sample: Sample) -> Score:
        async with gate:
            begun = time.perf_counter()
            try:
                value = await asyncio.wait_for(_call(reward, sample), seconds)
                score = checked(reward, value)
            except TimeoutError:
                score = replace(broken(reward, f"gave no answer in {seconds} s"), state="timeout")
            except passes:
                raise
            except BaseException as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
                score = raised(reward, error)
            return replace(score, seconds=time.perf_counter() - begun)

    async def tick() -> None:
        while True:
            turns()
            await asyncio.sleep(0.1)

    ticking = asyncio.create_task(tick())
    try:
        return list(await asyncio.gather(*(one(sample) for sample in samples)))
    finally:
        ticking.cancel()
