"""Real weights on GSM8K: sampling, learning and whole GRPO steps beside vLLM, TRL and both.

    python benchmarks/real_models.py --gsm8k data/gsm8k --models smollm2=SmolLM2-135M.gguf
    python benchmarks/real_models.py --gsm8k data/gsm8k --models qwen05=models/qwen --device cuda \
        --python vllm=vllm/bin/python trl-vllm=vllm/bin/python --only sampling "steps trl-vllm"
    python benchmarks/real_models.py --json runs/real_models/real_models.json --show
    python benchmarks/real_models.py --gsm8k data/gsm8k --models qwen05=models/qwen --curve

A model is a GGUF file or a Hugging Face folder; everyone gets the same folder in bfloat16, the same
questions (GSM8K's first, in the model's chat template) and the same limits, at temperature 1 from
the whole distribution. "fixed": no completion ends before its limit; "ragged": it ends where the
model ends it. Tokens count up to and with the end token. Each job (see JOBS in real_cases.py) runs
in a process of its own with a time limit; its rows and log are in the folder beside the JSON file,
which is written after every job. A job that is done is not run again; --again does.

Sampling: ours with layers compiled and log-probs; vLLM alone on the GPU, with CUDA graphs and
compilation, with the log-probs of the distribution sampled from and without, its prefix cache
emptied before every call as after an update. Learning: forward, loss, backward and optimiser on
what ours has sampled. Steps: sampling, scoring, learning, with a reward that differs
within nearly every group; TRL without reference model, checkpointing or correction of importance,
with the fused optimiser and the fastest of a few micro-batches. The first two steps do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from real_cases import JOBS, Row, Work
from real_curve import CURVE_JOBS, draw

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in the process that is measured
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}
ALL_JOBS = JOBS | CURVE_JOBS


def jobs(given: argparse.Namespace, works: Sequence[Work]) -> Iterator[tuple[str, str, Work]]:
    """The jobs asked for: a label, the name of the job, its work."""
    for work in works:
        for name in CURVE_JOBS if given.curve else JOBS:
            tried = given.micro_batches if name.startswith("steps trl") else given.micro_batches[:1]
            for size in tried:
                label = f"{work.model} {name}" + (f" {size}" if len(tried) > 1 else "")
                words = label.split()
                wanted = [one.split() for one in given.only] or [[]]
                if any(all(word in words for word in one) for one in wanted):
                    yield label, name, replace(work, micro_batch=size)


def run(label: str, name: str, work: Work, *, given: argparse.Namespace, limit: float) -> str:
    """One job in a process of its own; why it failed, or nothing."""
    place = parts(given) / label.replace(" ", "_")
    peer = ALL_JOBS[name][1]
    python = given.python.get(peer, sys.executable)
    extra = given.path.get(peer, "")
    path = os.pathsep.join(filter(None, [extra, os.environ.get("PYTHONPATH", "")]))
    job = json.dumps({"label": label, "name": name, "work": asdict(work), "place": str(place)})
    place.with_suffix(".jsonl").write_text("")
    with place.with_suffix(".log").open("w") as log:
        child = subprocess.Popen(
            [python, __file__, "--child", job],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | {"PYTHONPATH": path},
            start_new_session=True,  # so that a job's own processes end with it
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and what it has started
            child.wait()
    if code != 0:
        last = place.with_suffix(".log").read_text().strip().splitlines() or ["no output"]
        why = f"over {limit:.0f} s" if code is None else f"exit {code}"
        return f"{why}: {last[-1][:300]}"
    place.with_suffix(".done").touch()
    return ""


def child(job: dict[str, Any]) -> None:
    """Inside the process of a job: its rows, each written at once."""
    who, _, work_on = ALL_JOBS[job["name"]]
    work = Work(**job["work"])
    with Path(job["place"]).with_suffix(".jsonl").open("a") as rows:
        for row in work_on(work):
            told = {"model": work.model, "who": who, "label": job["label"], **row}
            rows.write(json.dumps(told | {"ran_with": ran_with()}) + "\n")
            rows.flush()


def ran_with() -> dict[str, str]:
    """The device and the versions of this process."""
    import torch

    found = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for name in ("torch", "transformers", "trl", "vllm"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def parts(given: argparse.Namespace) -> Path:
    """Where rows and logs of single jobs are."""
    return given.json.with_suffix(".parts")


def gather(given: argparse.Namespace, failed: dict[str, str]) -> dict[str, Any]:
    """All rows there are, of this run and those before it, into the JSON file."""
    known = json.loads(given.json.read_text()) if given.json.is_file() else {"failed": {}}
    lines = [
        line
        for file in sorted(parts(given).glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    failures = {**known["failed"], **failed}
    report = {
        "sizes": sizes(given),
        "rows": [json.loads(line) for line in lines],
        "failed": {
            label: why
            for label, why in failures.items()
            if not (parts(given) / f"{label.replace(' ', '_')}.done").exists()
        },
    }
    given.json.write_text(json.dumps(report, indent=1))
    return report


def sizes(given: argparse.Namespace) -> dict[str, int]:
    """What a step is made of."""
    return {
        "prompts": given.prompts,
        "group": given.group,
        "new_tokens": given.new_tokens,
        "rounds": given.rounds,
        "steps": given.steps,
    }


def tables(report: dict[str, Any]) -> str:
    """The rows as Markdown, one table for each kind of work."""
    found = []
    heads = {
        "sampling": "| model | lengths | engine | | tokens/s | mean length | of the roofline |",
        "learning": "| model | lengths | library | | s | tokens/s | MFU | peak, GiB |",
        "steps": "| model | lengths | library | | s a step | samples/s | sampling, s | learning, s "
        "| MFU | peak, GiB | reserved, GiB |",
    }
    for what, head in heads.items():
        rows = [row for row in report["rows"] if row["what"] == what]
        columns = head.count("|") - 1
        ruler = "|---" * 4 + "|---:" * (columns - 4) + "|"
        found += [f"### {what}", "", head, ruler, *map(line, rows), ""]
    return "\n".join(found)


def line(row: Row) -> str:
    """A row of a table."""
    cells = [row["model"], row["case"], row["who"], row["way"]]
    rate, length = f"{row['tokens_per_s']:,.0f}", f"{row.get('mean_length', 0):.0f}"
    peak, reserved = (f"{row[name] / 2**30:.1f}" if name in row else "–" for name in MEMORY)
    if row["what"] == "sampling":
        cells += [rate, length, f"{row['share']:.1%}"]
    elif row["what"] == "learning":
        cells += [f"{row['seconds']:.3f}", rate, f"{row['mfu']:.1%}", peak]
    else:
        cells += [f"{row['seconds']:.2f}", f"{row['samples_per_s']:.1f}"]
        cells += [f"{row['sampling_s']:.2f}", f"{row['learning_s']:.2f}", f"{row['mfu']:.1%}"]
        cells += [peak, reserved]
    return f"| {' | '.join(cells)} |"


MEMORY = ("peak", "reserved")
LATER = ("left out", "over ")  # the begin of why a job is not done that the next call may do


def pairs(given: str) -> tuple[str, str]:
    """NAME=VALUE of the command line."""
    name, found, value = given.partition("=")
    if not found or not value:
        raise argparse.ArgumentTypeError(f"{given!r}: write NAME=VALUE")
    return name, value


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", type=pairs, default=[], help="NAME=GGUF file or folder")
    add("--gsm8k", type=Path, help="the folder with train.jsonl and test.jsonl")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, default=Path("runs/real_models/real_models.json"))
    add("--only", nargs="+", default=[], help="jobs with all words of one of these: 'qwen05 steps'")
    add("--again", action="store_true", help="also the jobs that are done")
    add("--show", action="store_true", help="only print the tables of the JSON file")
    add("--curve", action="store_true", help="accuracy over minutes, ours and TRL + vLLM")
    add("--python", nargs="+", type=pairs, default=[], help="PEER=its Python; trl, vllm, trl-vllm")
    add("--path", nargs="+", type=pairs, default=[], help="PEER=put before its PYTHONPATH")
    add("--prompts", type=int, default=64, help="of a step")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--new-tokens", type=int, default=256)
    add("--rounds", type=int, default=4, help="of sampling, and steps of learning, that count")
    add("--steps", type=int, default=3, help="GRPO steps that count; of a curve: all")
    add(
        "--micro-batches",
        type=int,
        nargs="+",
        default=[32, 64, 128],
        help="that TRL tries; of a curve: the first",
    )
    add("--share", type=float, default=0.3, help="of the memory, for vLLM inside TRL")
    add("--seconds", type=float, default=520.0, help="for all jobs; one that is over is ended")
    add("--limit", type=float, default=300.0, help="seconds of one job")
    add("--learning-rate", type=float, default=2e-6, help="of a curve")
    add("--every", type=int, default=5, help="steps between two points of a curve")
    add("--problems", type=int, default=500, help="of GSM8K's test, for a point of a curve")
    add("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not given.child and not given.show and not (given.models and given.gsm8k):
        parser.error("give --models and --gsm8k")
    given.python, given.path = dict(given.python), dict(given.path)
    return given


def main() -> None:
    given = arguments()
    if given.child:
        child(given.child)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # its rows are written, and some engines never end by themselves
    if not given.show:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the job with it
        measure(given)
    report = json.loads(given.json.read_text())
    print(tables(report))
    for label, why in report["failed"].items():
        print(f"failed: {label}: {why}")
    if any(row["what"] == "curve" for row in report["rows"]):
        draw(report["rows"], given.json.with_suffix(".png"))
    if any(why.startswith(LATER) for why in report["failed"].values()) and not given.show:
        sys.exit("not all is done for want of time: the same command goes on")


def measure(given: argparse.Namespace) -> None:
    """Job after job, within the time there is."""
    began = time.monotonic()
    parts(given).mkdir(parents=True, exist_ok=True)
    works = [
        Work(
            model=name,
            source=source,
            gsm8k=str(given.gsm8k),
            folder=str(given.json.parent / name),
            device=given.device,
            **sizes(given),
            share=given.share,
            learning_rate=given.learning_rate,
            every=given.every,
            problems=given.problems,
        )
        for name, source in given.models
    ]
    failed: dict[str, str] = {}
    for work in works:
        Path(work.folder).mkdir(parents=True, exist_ok=True)
    for label, name, work in jobs(given, works):
        left = given.seconds - (time.monotonic() - began)
        done = (parts(given) / label.replace(" ", "_")).with_suffix(".done")
        if done.exists() and not given.again:
            continue
        if left < 20:
            failed[label] = "left out, no time"
            print(f"{label}: {failed[label]}", flush=True)
            continue
        print(f"{label}: begins, {left:.0f} s left", flush=True)
        done.unlink(missing_ok=True)
        at = time.monotonic()
        why = run(label, name, work, given=given, limit=min(given.limit, left))
        print(f"{label}: {why or 'done'} after {time.monotonic() - at:.0f} s", flush=True)
        if why:
            failed[label] = why
        gather(given, failed)
    gather(given, failed)


if __name__ == "__main__":
    main()
