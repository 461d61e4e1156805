"""How many CPU threads a run computes with: tried once at its start, then the same to its end.

Another number rounds differently: sums over many elements, some matrix products. So it is part of
what a run is: written into its folder, and taken from there when the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from posttrain.build.setup import choose_compile, choose_device
from posttrain.config import Recipe
from posttrain.fast.score import replicas_for
from posttrain.models.load import Policy
from posttrain.rollout.engines.local import samples_alone
from posttrain.runs import RunFolder, write_sealed
from posttrain.runs.files import check_seal, read_record
from posttrain.track.progress import phase

FILE_NAME = "threads.json"
BESIDE_GPU = 4
LARGE = 200_000_000  # weights: every operation of such a model has work for all cores
WORTH = 1.3  # how many times as fast fewer threads must be, for the same choice again tomorrow
ROUNDS, ENOUGH = 5, 2.0  # seconds, after which no further round begins
OPERATIONS = 1e10  # in a trial of learning: a fraction of a second
ROWS, SAMPLED = 64, 4  # of a trial at most; its passes that sample, to one that learns

Measure = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Threads:
    """A number of threads, why it is that, and the seconds of a trial step where there was one.

    ``replicas`` of a small model learn at the same time, each in a thread of its own beside those.
    """

    number: int
    reason: str
    replicas: int = 1
    seconds: Mapping[int, float] = field(default_factory=dict)
    worth_saying: bool = False

    def __str__(self) -> str:
        return f"threads: {self.number}, {self.reason}"


@contextlib.contextmanager
def own_threads() -> Iterator[None]:
    """Afterwards torch has the threads that it had before: the next run may be of another model."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settle_threads(
    recipe: Recipe,
    policy: Policy,
    *,
    folder: RunFolder,
    resume: bool = False,
    known: Threads | None = None,
) -> Threads:
    """Give torch the threads of a run, and note them in its folder; one that goes on keeps its own.

    ``known`` are those of a run that this one is made together with.
    That holds on a machine with fewer cores, too: slower, and the same numbers.
    """
    path = folder.path / FILE_NAME
    if resume and recipe.run.threads is None and path.exists():
        record = read_record(path)
        check_seal(record, path)
        known = _as_recorded(int(record["threads"]), replicas=int(record.get("replicas", 1)))
        return _used(known)
    chosen = use_threads(recipe, policy) if known is None else _used(known)
    record = {"threads": chosen.number, "reason": chosen.reason, "replicas": chosen.replicas}
    if chosen.seconds:
        record["seconds"] = {str(number): seconds for number, seconds in chosen.seconds.items()}
    write_sealed(path, record)
    return chosen


def use_threads(recipe: Recipe, policy: Policy) -> Threads:
    """Choose the threads of a new run, and give them to torch."""
    own = recipe.run.threads or torch.get_num_threads()
    chosen = choose_threads(recipe, policy)
    # Replicas share no operation: their number needs no trial.
    return _used(replace(chosen, replicas=_replicas(recipe, policy, threads=own)))


def _replicas(recipe: Recipe, policy: Policy, *, threads: int) -> int:
    rl = recipe.rl if "rl" in recipe.stages else None  # a resolved recipe has no other sections
    others = (rl and rl.critic, recipe.teacher and recipe.teacher.model)
    several = recipe.sweep or (rl and (rl.adapters or 1) > 1)
    alone = choose_device(recipe) == "cpu" and not any(others) and not several
    return replicas_for(policy.model, threads) if alone else 1


def _used(chosen: Threads) -> Threads:
    torch.set_num_threads(chosen.number)
    return chosen


def choose_threads(recipe: Recipe, policy: Policy, *, measure: Measure | None = None) -> Threads:
    """The threads of a new run: those asked for, torch's own, or fewer that a trial found faster.

    In a container PyTorch starts one for each core of the machine, however few it may use; others
    may be at work on some; and a small model has too little to do for many. ``measure`` gives the
    seconds of a trial with a number of threads.
    """
    if recipe.run.threads is not None:
        return Threads(number=recipe.run.threads, reason="as run.threads says")
    own, device = torch.get_num_threads(), choose_device(recipe)
    if device != "cpu":  # beside a GPU the CPU has only small things to do
        return Threads(number=min(own, BESIDE_GPU), reason="beside a GPU")
    weights = sum(weight.numel() for weight in policy.model.parameters())
    if own == 1 or recipe.run.deterministic or choose_compile(recipe, device) or weights > LARGE:
        return Threads(number=own, reason="torch's own, without a trial")
    counts = [own >> halved for halved in range(own.bit_length())]
    with phase("trying how many threads are fastest"), torch.random.fork_rng(devices=[]):
        learns = _replicas(recipe, policy, threads=own) == 1
        seconds = try_each(counts, measure or _trial(policy, weights, learns=learns))
    chosen = pick(seconds)
    tried = ", ".join(f"{1000 * seconds[count]:.0f} ms with {count}" for count in sorted(counts))
    why = "the fastest"
    if seconds[chosen] > min(seconds.values()):
        why = "as torch chooses, for fewer are not much faster"
    return Threads(
        number=chosen,
        reason=f"{why}; a trial step took {tried}",
        seconds=seconds,
        worth_saying=True,
    )


def try_each(counts: Sequence[int], measure: Measure) -> dict[int, float]:
    """The median seconds with each number of threads, measured in turns after a first try."""
    spent = sum([measure(count) for count in counts])  # starts the threads, and finds memory
    rounds: list[dict[int, float]] = []
    while not rounds or (len(rounds) < ROUNDS and spent < ENOUGH):
        rounds.append({count: measure(count) for count in counts})
        spent += sum(rounds[-1].values())
    return {count: statistics.median(took[count] for took in rounds) for count in counts}


def pick(seconds: Mapping[int, float]) -> int:
    """The most threads, unless fewer are clearly faster.

    >>> pick({2: 0.10, 1: 0.09}), pick({2: 0.10, 1: 0.05})
    (2, 1)
    """
    fastest = min(seconds, key=lambda count: seconds[count])
    return fastest if seconds[max(seconds)] > WORTH * seconds[fastest] else max(seconds)


def _as_recorded(number: int, *, replicas: int) -> Threads:
    able = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(able(0)) if able is not None else os.cpu_count() or number
    if number <= cores:
        return Threads(number=number, reason="as the run began", replicas=replicas)
    return Threads(
        number=number,
        replicas=replicas,
        reason=f"as the run began, though here are {cores} cores: its numbers stay the same to the "
        f"last bit, and it is slower; posttrain run RECIPE --resume --run.threads {cores} "
        "--allow-changes run.threads is faster and rounds differently",
        worth_saying=True,
    )


def _trial(policy: Policy, weights: int, *, learns: bool) -> Measure:
    """A small step of the model: passes of one token a row, as in sampling, and one that learns.

    Where one thread samples anyway, without those that sample. Where replicas learn, in threads of
    their own, the last pass has no gradient.
    """
    model, length = policy.model, 16
    sampled = 0 if samples_alone(model) else SAMPLED
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rows = min(ROWS, max(1, int(OPERATIONS / (6 * weights * length))))
    tokens = torch.arange(rows * length).remainder(model.config.get_text_config().vocab_size)

    def measure(count: int) -> float:
        torch.set_num_threads(count)
        begun = time.perf_counter()
        with torch.no_grad():
            for _ in range(sampled):
                model(input_ids=tokens[:, None], use_cache=False)
        if trained:
            with torch.set_grad_enabled(learns):
                logits = model(input_ids=tokens.view(rows, length), use_cache=False).logits
                total = logits.float().logsumexp(-1).sum()
            if learns:
                torch.autograd.grad(total, trained, allow_unused=True)
        return time.perf_counter() - begun

    return measure
