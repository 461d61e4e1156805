"""What the documentation measures on a GPU, one job after another, by one command.

    python benchmarks/on_gpu.py --out gpu --gsm8k data/gsm8k --minutes 25 --models \
        smollm2=SmolLM2-135M.gguf qwen05=models/qwen05 qwen15=models/qwen15
    python benchmarks/on_gpu.py --list
    python benchmarks/on_gpu.py --out gpu --gsm8k data/gsm8k --models smollm2=F --only tests sums

A model is a GGUF file, which is imported first, or a Hugging Face folder. A job whose model, data
or packages are not there is left out and named. Each is a process of its own with a limit and
writes OUT/NAME.log; what has taken how long and ended how is in OUT/done.json. What is done is not
run again, and runs inside a job go on where they were: the same command continues after a cut.
Where vLLM needs packages of its own, --vllm-path puts them before the PYTHONPATH of the jobs that
ask it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
ALWAYS = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}  # a log has all that came before a cut
PACKAGES = ("pydantic", "pyarrow", "typer", "rich", "matplotlib")  # that no run does without


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command in words, with {gsm8k}, {out} and names of models to be filled in."""

    command: str
    minutes: float
    vllm: bool = False
    packages: Sequence[str] = PACKAGES
    ask: signal.Signals = signal.SIGTERM  # what it is asked by to end

    @property
    def fields(self) -> list[str]:
        """What is filled in."""
        found = (field for _, field, *_ in string.Formatter().parse(self.command))
        return list(dict.fromkeys(filter(None, found)))

    def words(self, known: Mapping[str, str]) -> list[str]:
        """The command as it is run."""
        return [sys.executable, *(word.format_map(known) for word in shlex.split(self.command))]


JOBS = {
    "tests": Job(
        command="-m pytest -v --tb=short --durations=10 -m gpu "
        "-p no:benchmark --continue-on-collection-errors tests/gpu",
        minutes=9,
        packages=("pydantic", "pytest"),
        ask=signal.SIGINT,  # on which pytest tells what has failed so far
    ),
    "sums": Job(
        command="-m posttrain run recipes/smollm2_arithmetic.toml --resume "
        "--model.name {smollm2} --run.folder {out}/runs/sums",
        minutes=9,
    ),
    "steps": Job(
        command="benchmarks/real_models.py --device cuda --gsm8k {gsm8k} --seconds 520 "
        "--models qwen05={qwen05} --micro-batches 64 --json {out}/steps/real_models.json "
        "--only prepare 'steps posttrain' 'steps trl-vllm'",
        minutes=9,
        vllm=True,
    ),
    "rollout": Job(
        command="benchmarks/rollout.py --device cuda --rounds 3 --seconds 420 --only '512 256' "
        "--engines compiled,engine --json {out}/rollout.json",
        minutes=8,
        vllm=True,
        packages=("pydantic", "rich"),
    ),
    "calculator": Job(
        command="benchmarks/calculator.py --model {qwen05} --gsm8k {gsm8k} --seeds 0 "
        "--parallel 2 --folder {out}/runs/calculator",
        minutes=12,
    ),
    "lora": Job(
        command="benchmarks/compare_trl.py --device cuda --quick --lora 16 "
        "--json {out}/lora.json --only 'smollm2-135m 8'",
        minutes=6,
        packages=(*PACKAGES, "trl", "datasets", "peft"),
    ),
    "adapters": Job(
        command="benchmarks/adapters.py --device cuda --json {out}/adapters.json", minutes=6
    ),
    "distill": Job(
        command="benchmarks/distill_qwen.py --student {qwen05} --teacher {qwen15} "
        "--gsm8k {gsm8k} --folder {out}/runs/distill",
        minutes=15,
    ),
    "lora_sums": Job(
        command="benchmarks/lora_sums.py --model {smollm2} --parallel 3 "
        "--folder {out}/runs/lora_sums",
        minutes=20,
    ),
}


def main() -> None:
    """Job after job, within the time there is."""
    given = arguments()
    if given.list:
        for name, job in JOBS.items():
            print(f"{name:10} {job.minutes:4g} min  python {job.command}")
        return
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    given.out.mkdir(parents=True, exist_ok=True)
    done = read(given.out)
    known = places(given)
    for name in given.only or JOBS:
        left = given.minutes - (time.monotonic() - began) / 60
        if name in done and done[name]["ended"] == "well":
            continue
        if lacks := missing(JOBS[name], known, vllm_path=given.vllm_path):
            print(f"{name}: left out, it needs {lacks}", flush=True)
            continue
        if left < 1:
            print(f"{name}: left out, {given.minutes:g} minutes are over", flush=True)
            continue
        words = JOBS[name].words(known)
        print(f"{name}: begins, {left:.0f} minutes left", flush=True)
        at = time.monotonic()
        ended = run(
            words,
            log=given.out / f"{name}.log",
            seconds=60 * min(left, JOBS[name].minutes),
            environment=environment(JOBS[name], given.vllm_path),
            ask=JOBS[name].ask,
        )
        minutes = round((time.monotonic() - at) / 60, 2)
        done[name] = {"ended": ended, "minutes": minutes}
        (given.out / "done.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(f"{name}: ended {ended} after {minutes:g} minutes", flush=True)
    if any(done.get(name, {}).get("ended") != "well" for name in given.only or JOBS):
        sys.exit(1)


def read(out: Path) -> dict[str, dict[str, str | float]]:
    """What earlier calls have done."""
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, dict[str, str | float]] = json.loads((out / "done.json").read_text())
        return found
    return {}


def places(given: argparse.Namespace) -> dict[str, str]:
    """Where the models and the data are that are there, by the names of the commands."""
    known = {"out": str(given.out.resolve())}
    if all((given.gsm8k / f"{part}.jsonl").is_file() for part in ("train", "test")):
        known["gsm8k"] = str(given.gsm8k.resolve())
    used = {field for name in given.only or JOBS for field in JOBS[name].fields}
    for name, source in given.models:
        if name not in used:
            continue
        if folder := as_folder(name, Path(source), out=given.out):
            known[name] = str(folder)
    return known


def as_folder(name: str, source: Path, *, out: Path) -> Path | None:
    """A model's Hugging Face folder; a GGUF file is imported once. None: there is no model."""
    if source.is_dir():
        return source.resolve()
    folder = (out / "models" / name).resolve()
    if not source.is_file() or folder.is_dir():
        return folder if folder.is_dir() else None
    command = [sys.executable, "-m", "posttrain", "model", "import"]
    ended = run(
        [*command, str(source.resolve()), str(folder)],
        log=out / f"model_{name}.log",
        seconds=300,
        environment=environment(None, ""),
    )
    if ended == "well":
        return folder
    print(f"{name}: not imported, ended {ended}", flush=True)
    return None


def missing(job: Job, known: Mapping[str, str], *, vllm_path: str) -> str:
    """What a job would fail for at once; nothing, where all is there."""
    absent = [field for field in job.fields if field not in known]
    lost = ["--gsm8k" if field == "gsm8k" else f"--models {field}=" for field in absent]
    path = [*(vllm_path.split(os.pathsep) if job.vllm else ()), *sys.path]
    find = importlib.machinery.PathFinder.find_spec
    packages = [name for name in job.packages if find(name, path) is None]
    if packages:
        lost.append(f"packages: {', '.join(packages)}")
    return "; ".join(lost)


def environment(job: Job | None, vllm_path: str) -> dict[str, str]:
    """This process's, with posttrain's source, and for vLLM what it wants."""
    wants = job is not None and job.vllm
    paths = [vllm_path if wants else "", str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    more = ALWAYS | (VLLM if wants else {})
    return os.environ | more | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(
    words: Sequence[str],
    *,
    log: Path,
    seconds: float,
    environment: Mapping[str, str],
    ask: signal.Signals = signal.SIGTERM,
) -> str:
    """One job with all it starts; how it ended."""
    with log.open("wb") as output:
        job = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = job.wait(seconds)
            return "well" if code == 0 else f"with code {code}, see {log.name}"
        except subprocess.TimeoutExpired:
            return f"by its limit, see {log.name}"
        finally:
            stop(job, ask=ask)


def stop(job: subprocess.Popen[bytes], *, ask: signal.Signals) -> None:
    """Asks a job and all it has started to save themselves, then ends what is left."""
    for way, patience in ((ask, 20.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(job.pid, way)
            until = time.monotonic() + patience
            while time.monotonic() < until:
                job.poll()
                os.killpg(job.pid, 0)
                time.sleep(0.1)
    job.wait()


def pairs(given: str) -> tuple[str, str]:
    """NAME=VALUE of the command line."""
    name, found, value = given.partition("=")
    if not found or not value:
        raise argparse.ArgumentTypeError(f"{given!r}: write NAME=FILE OR FOLDER")
    return name, value


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", type=pairs, default=[], help="smollm2=, qwen05=, qwen15=")
    add("--gsm8k", type=Path, default=Path("data/gsm8k"), help="with train.jsonl and test.jsonl")
    add("--out", type=Path, default=Path("runs/on_gpu"))
    add("--minutes", type=float, default=120.0, help="for all jobs")
    add("--only", nargs="+", choices=JOBS, default=[], help="these, in this order")
    add("--vllm-path", default="", help="put before the PYTHONPATH of jobs with vLLM")
    add("--list", action="store_true", help="print the jobs and run none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
