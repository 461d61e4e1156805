"""Tokens a second of sampling, over batch size and length: our engine beside three others.

    python benchmarks/rollout.py --device cpu --quick
    python benchmarks/rollout.py --device cuda --quick --json rollout.json     # about a minute
    python benchmarks/rollout.py --device cuda --json rollout.json --only 'ragged 512'
    VLLM_ENABLE_V1_MULTIPROCESSING=0 python benchmarks/rollout.py --device cuda --rounds 3 \
        --only 'fixed 512 256' --engines 'compiled,engine' --json rollout.json   # posttrain's two

All run in this process on the same random weights (see bench_models.py) and prompts, in turns; the
first call of each is not counted, and the median of the rounds is shown. Every prompt has a group
of completions, as in reinforcement learning. "fixed": no completion ends by itself; "ragged": every
token is the last with probability 4 / limit. Only tokens up to the end of a completion count.

Ours: float32 master weights, on a GPU computed in bfloat16, with the layers compiled or not; it
returns log-probs. transformers: weights in bfloat16 on a GPU, no log-probs; `generate` with the
faster of a dynamic and a static, compiled cache on the first case (--quick: dynamic, for want of
time), and continuous batching as `generate_batch` sets it up, without its start. vLLM where it is
installed, but with --quick: its start alone takes a minute; as its own `LLM.generate` does it, and
as posttrain's engine asks it (vllm_in_process.py), which proves its weights after every update.

Mismatch, of the engines that return rollouts: the absolute difference of each sampled token's
log-prob to the learner's, with the same weights and arithmetic, in the last round.

The share of the roofline is the least time that the bytes and operations of these completions take
at the device's peak (roofline.py) over the measured time; the counting is printed below the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from bench_models import NEVER, build_model, prompts
from rich.console import Console
from rich.table import Table
from roofline import Peak, Shape, average, decode_step, explain, find_peak
from samplers import Job, Native, Sampler, Setup, free, set_threads
from sampling_peers import ContinuousBatching, Generate, Vllm
from torch import Tensor
from vllm_in_process import EngineVllm

from posttrain.data.collate import collate
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.types import Rollout, Score

SAMPLERS: dict[str, Callable[[Setup], Sampler]] = {
    "posttrain": lambda setup: Native(setup, compiled=False),
    "posttrain, compiled": lambda setup: Native(setup, compiled=True),
    "transformers generate": Generate,
    "transformers continuous": ContinuousBatching,
    "vLLM": Vllm,
    "vLLM, as our engine": EngineVllm,
}
BASE = "transformers generate"  # what the others are compared with
GROUP = 8
QUICK_SECONDS = {"cpu": 120.0, "cuda": 50.0}  # after which --quick begins no other case


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch to sample."""

    model: str
    lengths: str
    sequences: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure: ``rounds``, fewer for an engine that has taken ``seconds``."""

    rounds: int
    seconds: float


def cases(device: str, *, quick: bool) -> list[Case]:
    """What is measured; with little time, large batches of both lengths come first."""
    models = {"cpu": ["tiny"], "cuda": ["smollm2-135m", "llama-3.2-1b"]}[device]
    sequences, tokens = {
        ("cpu", True): ([32, 8], [16]),
        ("cpu", False): ([128, 32, 8], [32, 128]),
        ("cuda", True): ([512, 64], [64]),
        ("cuda", False): ([512, 128, 32], [64, 256]),
    }[device, quick]
    found = [
        Case(model=model, lengths=lengths, sequences=count, new_tokens=limit)
        for model in (models[:1] if quick else models)
        for lengths in ("fixed", "ragged")
        for limit in tokens
        for count in sequences
    ]
    return sorted(found, key=lambda case: -case.sequences) if quick else found


def label(row: Mapping[str, Any]) -> str:
    """A case in a few words."""
    return f"{row['model']} {row['lengths']} {row['sequences']}×{row['new_tokens']}"


def make_job(case: Case, tokenizer: Any) -> Job:
    """The prompts of a case, as tokens."""
    texts = prompts(max(1, case.sequences // GROUP), ragged=case.lengths == "ragged")
    tokens = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return Job(prompts=tokens, group=case.sequences // len(tokens), new_tokens=case.new_tokens)


def start(names: Sequence[str], setup: Setup) -> tuple[dict[str, Sampler], dict[str, str]]:
    """The engines that can be had, and why others cannot."""
    found: dict[str, Sampler] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            found[name] = SAMPLERS[name](setup)
        except Exception as error:  # noqa: BLE001 - one engine that fails is a line of the table
            missing[name] = reason(error)
    return found, missing


def reason(error: Exception) -> str:
    """The first line of an error, the whole of which is printed."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [""]
    return f"not available: {type(error).__name__}: {lines[0][:120]}"


def race(
    samplers: Mapping[str, Sampler], job: Job, *, effort: Effort
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Engines in turns on one job: seconds of every round, lengths; and why others gave up."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name, sampler in samplers.items():
        try:
            settings = sampler.prepare(job)
            sampler.sample(job, seed=1)  # not counted: memory, kernels, CUDA graphs
            found[name] = {"settings": settings, "seconds": [], "rates": []}
        except Exception as error:  # noqa: BLE001 - the others go on
            failed[name] = reason(error)
    for _ in range(effort.rounds):
        for name, entry in list(found.items()):
            if sum(entry["seconds"]) > effort.seconds:
                continue
            try:
                # The same seed: what differs between rounds is the machine, not the lengths.
                taken, entry["lengths"] = samplers[name].sample(job, seed=1)
                entry["seconds"].append(taken)
                entry["rates"].append(sum(entry["lengths"]) / taken)  # some draw anew every round
            except Exception as error:  # noqa: BLE001 - the others go on
                failed[name] = reason(error)
                del found[name]
    return found, failed


def mismatch(setup: Setup, weights: Mapping[str, Tensor], groups: list[list[Rollout]]) -> dict:
    """|log π_learner − log π_sampler| of the sampled tokens; the learner computes as in a run."""
    model = setup.own_model(torch.float32)
    model.load_state_dict(weights)
    learner = LocalLearner(
        model, adamw(model, learning_rate=0.0), save=lambda folder: None, compute=setup.compute
    )
    scored = [replace(one, score=Score(value=0.0)) for group in groups for one in group]
    batch = learner.infer(collate(scored, pad_token=0))
    apart = batch.need("old_logprobs").cpu() - batch.need("sampler_logprobs").cpu()
    values = apart[batch.mask].abs().double()
    del learner, model
    free(setup.device)
    return {"mismatch_mean": float(values.mean()), "mismatch_max": float(values.max())}


def describe(entry: Mapping[str, Any], job: Job, *, shape: Shape, peak: Peak, size: int) -> dict:
    """An engine's rate and its share of the roofline; ``size`` is the bytes of a number."""
    seconds, lengths = statistics.median(entry["seconds"]), entry["lengths"]
    work = average([len(row) for row in job.rows], lengths)
    step = decode_step(shape, rows=work.rows, length=work.length, item_bytes=size)
    least = work.steps * step.seconds(peak)
    return {
        "settings": entry["settings"],
        "tokens_per_s": statistics.median(entry["rates"]),
        "median_s": seconds,
        "rounds_s": entry["seconds"],
        "mean_length": statistics.mean(lengths),
        "roofline_s": least,
        "share": least / seconds,
        "work": asdict(work),
        "step": asdict(step),
        "counting": explain(work, step=step, peak=peak),
    }


def run_model(
    chosen: Sequence[Case],
    setup: Setup,
    *,
    peak: Peak,
    names: Sequence[str],
    effort: Effort,
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """All cases of one model; the engines start once, and take other weights for ragged lengths."""
    shape = Shape.of(setup.model)
    samplers, missing = start(names, setup)
    loaded, built = NEVER, {NEVER: setup.model.state_dict()}
    for case in chosen:
        if time.perf_counter() > deadline:
            print(f"left out for want of time: {case}", flush=True)
            continue
        chance = 4 / case.new_tokens if case.lengths == "ragged" else NEVER
        if chance != loaded:
            if chance not in built:
                built[chance] = build_model(case.model, end_probability=chance)[0].state_dict()
            for sampler in samplers.values():
                sampler.load(built[chance])
            loaded = chance
        job = make_job(case, setup.tokenizer)
        found, failed = race(samplers, job, effort=effort)
        size = setup.compute.itemsize
        engines = {
            name: describe(entry, job, shape=shape, peak=peak, size=size)
            for name, entry in found.items()
        }
        for name in engines:
            if rollouts := getattr(samplers[name], "found", None):
                engines[name] |= mismatch(setup, built[loaded], rollouts)
        rates = {name: round(engine["tokens_per_s"]) for name, engine in engines.items()}
        print(f"{label(asdict(case))}: {rates}", flush=True)
        yield {**asdict(case), "engines": engines, "missing": {**missing, **failed}}
    for sampler in samplers.values():
        sampler.close()


def show(rows: Sequence[Mapping[str, Any]], peak: Peak) -> None:
    """The table, and the counting below it."""
    titles = ("model", "lengths", "batch", "limit", "engine", "tokens/s", f"to {BASE.split()[1]}")
    titles = (*titles, "s", "roofline s", "share", "mismatch")
    table = Table(*titles, title="Sampling (medians); mismatch: mean, max of the tokens")
    for row in rows:
        head = [row["model"], row["lengths"], str(row["sequences"]), str(row["new_tokens"])]
        base = row["engines"].get(BASE, {}).get("tokens_per_s")
        for name, engine in row["engines"].items():
            ratio = f"{engine['tokens_per_s'] / base:.1f}×" if base else "–"
            numbers = [f"{engine['tokens_per_s']:,.0f}", ratio, f"{engine['median_s']:.3f}"]
            share = f"{engine['share']:.1%}"
            apart = ""
            if "mismatch_mean" in engine:
                apart = f"{engine['mismatch_mean']:.1e}, {engine['mismatch_max']:.1e}"
            table.add_row(*head, name, *numbers, f"{engine['roofline_s']:.4f}", share, apart)
            head = [""] * 4
        for name, why in row["missing"].items():
            table.add_row(*head, name, why.split(":")[0], *[""] * 5)
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    moved, done = peak.bytes_per_second, peak.flops_per_second
    print(f"Peak: {moved:.3g} bytes/s, {done:.3g} operations/s ({peak.source}).")
    print("Counting of a decode step (benchmarks/roofline.py), with the first engine's lengths:")
    for row in rows:
        for engine in list(row["engines"].values())[:1]:  # ours, unless it was not asked for
            print(f"- {label(row)}: {engine['counting']}")
    notes = {f"{name}: {why}" for row in rows for name, why in row["missing"].items()}
    notes |= {f"{n}: {e['settings']}" for row in rows for n, e in row["engines"].items()}
    print("\n".join(sorted(notes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="few cases and rounds, no vLLM")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="only the cases with these words, 'ragged 512'")
    parser.add_argument("--engines", default="", help="comma-separated parts of their names")
    parser.add_argument("--rounds", type=int, help="that are counted; 5, with --quick 3")
    parser.add_argument("--seconds", type=float, help="begin no case after this time")
    given = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    began, cuda = time.perf_counter(), given.device == "cuda"
    set_threads(given.device)
    wanted = [word.strip() for word in given.engines.split(",")]
    names = [name for name in SAMPLERS if any(word in name for word in wanted)]
    if given.quick and not given.engines:
        names = [name for name in names if "vLLM" not in name]
    limit = given.seconds or (QUICK_SECONDS[given.device] if given.quick else float("inf"))
    compute = torch.bfloat16 if cuda else torch.float32
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peak": asdict(peak := find_peak(given.device, compute)),
        "rows": [],
    }
    chosen = [
        case
        for case in cases(given.device, quick=given.quick)
        if all(word in map(str, asdict(case).values()) for word in given.only.split())
    ]
    effort = Effort(rounds=3, seconds=3.0) if given.quick else Effort(rounds=5, seconds=20.0)
    effort = replace(effort, rounds=given.rounds or effort.rounds)
    for model in dict.fromkeys(case.model for case in chosen):
        built, tokenizer = build_model(model)
        caches = ("dynamic", "static") if cuda and not given.quick else ("dynamic",)
        setup = Setup(
            model=built, tokenizer=tokenizer, device=given.device, compute=compute, caches=caches
        )
        rows = run_model(
            [case for case in chosen if case.model == model],
            setup,
            peak=peak,
            names=names,
            effort=effort,
            deadline=began + limit,
        )
        for row in rows:
            report["rows"].append(row)
            if given.json:  # after every case: a run that is cut short leaves what it has
                given.json.write_text(json.dumps(report, indent=1))
        free(given.device)
    show(report["rows"], peak)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
