"""posttrain and TRL, side by side: whole GRPO steps on the same weights, prompts and lengths.

    pip install 'posttrain[benchmarks]'
    python benchmarks/compare_trl.py --device cpu
    python benchmarks/compare_trl.py --device cuda --json compare.json
    python benchmarks/compare_trl.py --quick --only "tiny 16" --busy
    python benchmarks/compare_trl.py --device cuda --only "smollm2-135m 8" --lora 16

Both run in processes of their own, in turns, with the same model folder, prompts, group size,
limit of new tokens, precision, optimiser and reward. A step is the time between two calls of the
reward: sampling, scoring, learning and whatever a library does besides. The first steps, in which
memory is found and kernels are compiled, are not counted. TRL runs without a reference model, with
the fused optimiser, no gradient checkpointing, and the micro-batch size that is fastest for it. On
a CPU it runs with one thread and with one for each core, and the faster counts; posttrain chooses
for itself. ``--busy`` keeps all to two cores and measures each case twice: as the machine is, and
with a process that never rests on the second of them. With ``--lora`` both train adapters of that
rank beside all linear layers (TRL by peft), on a GPU with the base in bfloat16. Beside what was
measured stands the least that each library could take: the operations of what it computes, at the
rate of a large product.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from grpo_steps import RUNNERS, Case

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""As it was before posttrain was imported, which has waiting threads sleep: TRL gets none of it."""


def cases(device: str, *, quick: bool) -> list[Case]:
    """What is measured: sizes, lengths and groups."""
    found = []
    for model in ("tiny", "smollm2-135m"):
        for lengths in ("fixed", "ragged"):
            for group in (8, 16):
                found.append(_case(model, lengths, group=group, device=device, quick=quick))
    return found


def _case(model: str, lengths: str, *, group: int, device: str, quick: bool) -> Case:
    small = device == "cpu"
    sequences = {"tiny": 128, "smollm2-135m": 32}[model] if small else 512
    new_tokens = {"tiny": 32, "smollm2-135m": 16}[model] if small else 256
    return Case(
        model=model,
        lengths=lengths,
        group=group,
        prompts=sequences // group,
        new_tokens=new_tokens,
        steps=3 if quick else 6,
        warmup=1 if small and quick else 2,
        device=device,
        peer_micro_batch=sequences if small else 64,
    )


def measure(who: str, case: Case, folder: Path, *, threads: int | None = None) -> dict[str, Any]:
    """One library, in a process of its own; without ``threads`` it has its own default."""
    given = json.dumps({"who": who, "case": asdict(case), "folder": str(folder)})
    out = folder / f"{who}.json"
    done = subprocess.run(
        [sys.executable, __file__, "--child", given, "--json", str(out)],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    )
    if done.returncode:
        raise SystemExit(f"{who} failed on {case}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {**json.loads(out.read_text()), "threads": threads}


@contextlib.contextmanager
def neighbour(core: int | None) -> Iterator[None]:
    """Inside, another process never rests on this core; None: there is none."""
    if core is None:
        yield
        return
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compare(case: Case, *, rounds: int) -> dict[str, Any]:
    """Both libraries in turns; the best round of each."""
    from bench_models import NEVER, write_model

    cores = sorted(os.sched_getaffinity(0)) if case.device == "cpu" else []
    tried: dict[str, list[int | None]] = {"ours": [None], "peer": [1, len(cores)]}
    if case.device != "cpu":
        tried["peer"] = [None]
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chance = 4 / case.new_tokens if case.lengths == "ragged" else NEVER
        write_model(folder, shape=case.model, end_probability=chance)
        with neighbour(cores[-1] if case.busy else None):
            for _ in range(rounds):
                for who, threads in tried.items():
                    found[who] += [measure(who, case, folder, threads=n) for n in threads]
    best = {who: min(runs, key=lambda run: run["seconds"]) for who, runs in found.items()}
    ours, peer = best["ours"], best["peer"]
    return {
        **asdict(case),
        "ours_samples_per_s": case.sequences / ours["seconds"],
        "peer_samples_per_s": case.sequences / peer["seconds"],
        "ratio": peer["seconds"] / ours["seconds"],
        "peer_threads": peer["threads"],
        "ours_tokens_per_s": case.sequences * ours["split"]["rollout/length"] / ours["seconds"],
        "peer_tokens_per_s": case.sequences * peer["split"]["rollout/length"] / peer["seconds"],
        "ours_peak_bytes": ours["peak"],
        "peer_peak_bytes": peer["peak"],
        "ours_reserved_bytes": ours["reserved"],
        "peer_reserved_bytes": peer["reserved"],
        "ours_split": ours["split"],
        "peer_split": peer["split"],
        "operations": {} if case.lora else operations(case, mean=ours["split"]["rollout/length"]),
    }


def operations(case: Case, *, mean: float) -> dict[str, dict[str, float]]:
    """Of sampling and learning in a step of completions of ``mean`` length, for each library.

    We read a prompt once for its group, and no padding; TRL reads it for each completion, padded to
    the longest, and samples until the last one has ended.
    """
    from bench_models import build_model
    from roofline import Shape, average, decode_step, operations_of

    shape = Shape.of(build_model(case.model)[0])
    asked = [len(text) for text in case.texts]
    found = {}
    for who, prompt, length, readers in (
        ("ours", round(sum(asked) / len(asked)), round(mean), case.prompts),
        ("peer", max(asked), case.new_tokens, case.sequences),
    ):
        steps = average([prompt] * case.sequences, [length] * case.sequences)
        step = decode_step(shape, rows=steps.rows, length=steps.length, item_bytes=4)
        group = (prompt, [length] * (case.sequences // readers))
        found[who] = {
            "sampling": steps.steps * step.flops + 2 * shape.weights * prompt * readers,
            "learning": sum(operations_of(shape, [group] * readers).values()),
        }
    return found


def tell(rows: list[dict[str, Any]]) -> None:
    """Print what each row would take at the rate of a large product, and what it took."""
    rate = len(os.sched_getaffinity(0)) * product_rate()
    print(f"Operations, at the {rate:.2g} a second of a large product on all cores:")
    for row in rows:
        words = [row["model"], row["lengths"], str(row["group"]), "busy" if row["busy"] else ""]
        for who, name in (("ours", "posttrain"), ("peer", "TRL")):
            whole = row["prompts"] * row["group"] / row[f"{who}_samples_per_s"]
            sampled = row[f"{who}_split"]["time/rollout"]
            parts = ", ".join(
                f"{phase} {count:.2g}, {count / rate:.3f} s of {took:.3f} s"
                for (phase, count), took in zip(
                    row["operations"][who].items(), (sampled, whole - sampled), strict=True
                )
            )
            print(" ".join(filter(None, words)), f"{name}: {parts}")


def product_rate() -> float:
    """Operations a second of one core, by its own time: others may be at work."""
    import torch

    torch.set_num_threads(1)
    factor, times = torch.ones(1024, 1024), []
    for _ in range(10):
        began = time.thread_time()
        factor @ factor
        times.append(time.thread_time() - began)
    return 2 * 1024**3 / min(times)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    titles = (
        "model",
        "lengths",
        "group",
        "core",
        "posttrain",
        "TRL",
        "ratio",
        "peak",
        "TRL's peak",
    )
    learned = f" of adapters, rank {rows[0]['lora']}" if rows and rows[0]["lora"] else ""
    table = Table(*titles, title=f"Whole GRPO steps{learned}: samples a second, peak memory")
    for row in rows:
        table.add_row(
            row["model"],
            row["lengths"],
            str(row["group"]),
            "one busy" if row["busy"] else "",
            f"{row['ours_samples_per_s']:,.1f}",
            f"{row['peer_samples_per_s']:,.1f}",
            f"{row['ratio']:.1f}×",
            f"{row['ours_peak_bytes'] / 2**30:.2f} GiB",
            f"{row['peer_peak_bytes'] / 2**30:.2f} GiB",
        )
    Console().print(table)


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer steps, one round")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--only", default="", help="only the cases with these words, 'tiny ragged'")
    parser.add_argument("--peer-compile", action="store_true", help="TRL's torch_compile=True")
    parser.add_argument("--busy", action="store_true", help="also with one of two cores busy")
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        job = json.loads(given.child)
        found = RUNNERS[job["who"]](Case(**job["case"]), Path(job["folder"]))
        Path(given.json).write_text(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    if given.busy:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for case in cases(given.device, quick=given.quick):
        words = (case.model, case.lengths, str(case.group))
        if all(word in words for word in given.only.split()):
            for busy in (False, True) if given.busy else (False,):
                chosen = replace(case, peer_compile=given.peer_compile, busy=busy, lora=given.lora)
                rows.append(compare(chosen, rounds=1 if given.quick else 2))
                print(json.dumps(rows[-1]), flush=True)
                if given.json:
                    Path(given.json).write_text(json.dumps(rows, indent=1))
    show(rows)
    if given.device == "cpu" and not given.lora:
        tell(rows)


if __name__ == "__main__":
    main()
