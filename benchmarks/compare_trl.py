"""posttrain and TRL, side by side: whole GRPO steps on the same weights, prompts and lengths.

    pip install 'posttrain[benchmarks]'
    python benchmarks/compare_trl.py --device cpu
    python benchmarks/compare_trl.py --device cuda --json compare.json

Both run in processes of their own, in turns, with the same model folder, prompts, group size,
limit of new tokens, precision, optimiser and reward. A step is the time between two calls of the
reward: sampling, scoring, learning and whatever a library does besides. The first steps, in which
memory is found and kernels are compiled, are not counted. TRL runs without a reference model, with
the fused optimiser, no gradient checkpointing, and the micro-batch size that is fastest for it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    model: str
    lengths: str
    group: int
    prompts: int
    new_tokens: int
    steps: int
    warmup: int
    device: str
    peer_micro_batch: int
    peer_compile: bool = False
    seed: int = 0

    @property
    def sequences(self) -> int:
        """Completions in a step."""
        return self.prompts * self.group


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


class Clock:
    """When each step's completions were scored, by a reward that both libraries call."""

    def __init__(self, sequences: int) -> None:
        self.times: list[float] = []
        self._sequences = sequences
        self._seen = 0

    def score(self, text: str) -> float:
        """A reward that differs within nearly every group."""
        if self._seen % self._sequences == 0:
            self.times.append(time.perf_counter())
        self._seen += 1
        return sum(map(ord, text)) % 17 / 17

    def seconds(self, warmup: int) -> float:
        """The median time of a step."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(gaps[warmup:])


def run_ours(case: Case, folder: Path) -> dict[str, Any]:
    """posttrain."""
    from bench_models import prompts

    import posttrain

    clock = Clock(case.sequences)

    def reward(completion: str) -> float:
        return clock.score(completion)

    result = posttrain.rl(
        model=folder,
        prompts=prompts(case.prompts * 4, ragged=case.lengths == "ragged", seed=case.seed),
        reward=reward,
        grading={"workers": 0},
        model_options={"compile": case.device == "cuda"},
        folder=folder / f"run{time.time_ns()}",
        algorithm="grpo",
        kl={"placement": "none"},
        steps=case.steps + case.warmup + 1,
        prompts_per_step=case.prompts,
        group_size=case.group,
        max_new_tokens=case.new_tokens,
        learning_rate=1e-6,
        check=False,
    )
    rows = result.metrics().to_pylist()[case.warmup :]
    names = ("time/rollout", "time/reward", "time/train", "rollout/length")
    split = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
    return {"seconds": clock.seconds(case.warmup), "peak": peak(case.device), "split": split}


def run_trl(case: Case, folder: Path) -> dict[str, Any]:
    """TRL at its best settings for this workload."""
    import torch
    from bench_models import prompts
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock(case.sequences)
    sampled: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [clock.score(text) for text in completions]

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate(*args, **kwargs)
            sampled.append(time.perf_counter() - began)
            return found

    texts = prompts(case.prompts * 4, ragged=case.lengths == "ragged", seed=case.seed)
    micro = case.peer_micro_batch
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=case.sequences // micro,
        num_generations=case.group,
        max_completion_length=case.new_tokens,
        max_steps=case.steps + case.warmup + 1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        bf16=case.device == "cuda",
        use_cpu=case.device == "cpu",
        gradient_checkpointing=False,
        torch_compile=case.peer_compile,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=case.device == "cuda",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = Timed(
        model=str(folder),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
    )
    assert next(trainer.model.parameters()).dtype == torch.float32
    trainer.train()
    rollout = statistics.median(sampled[case.warmup :])
    mean = [row["completions/mean_length"] for row in trainer.state.log_history if "loss" in row]
    split = {"time/rollout": rollout, "rollout/length": statistics.median(mean)}
    return {"seconds": clock.seconds(case.warmup), "peak": peak(case.device), "split": split}


def peak(device: str) -> int:
    """The most memory this process has held: on the GPU with all that is set aside, or in all."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


RUNNERS: dict[str, Callable[[Case, Path], dict[str, Any]]] = {"ours": run_ours, "peer": run_trl}


def measure(who: str, case: Case, folder: Path) -> dict[str, Any]:
    """One library, in a process of its own."""
    given = json.dumps({"who": who, "case": asdict(case), "folder": str(folder)})
    out = folder / f"{who}.json"
    done = subprocess.run(
        [sys.executable, __file__, "--child", given, "--json", str(out)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode:
        raise SystemExit(f"{who} failed on {case}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def compare(case: Case, *, rounds: int) -> dict[str, Any]:
    """Both libraries in turns; the best round of each."""
    from bench_models import NEVER, write_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chance = 4 / case.new_tokens if case.lengths == "ragged" else NEVER
        write_model(folder, shape=case.model, end_probability=chance)
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
        for _ in range(rounds):
            for who in found:
                found[who].append(measure(who, case, folder))
    best = {who: min(runs, key=lambda run: run["seconds"]) for who, runs in found.items()}
    ours, peer = best["ours"], best["peer"]
    return {
        **asdict(case),
        "ours_samples_per_s": case.sequences / ours["seconds"],
        "peer_samples_per_s": case.sequences / peer["seconds"],
        "ratio": peer["seconds"] / ours["seconds"],
        "ours_tokens_per_s": case.sequences * ours["split"]["rollout/length"] / ours["seconds"],
        "peer_tokens_per_s": case.sequences * peer["split"]["rollout/length"] / peer["seconds"],
        "ours_peak_bytes": ours["peak"],
        "peer_peak_bytes": peer["peak"],
        "ours_split": ours["split"],
        "peer_split": peer["split"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    titles = ("model", "lengths", "group", "posttrain", "TRL", "ratio", "peak", "TRL's peak")
    table = Table(*titles, title="Whole GRPO steps: samples a second, peak memory")
    for row in rows:
        table.add_row(
            row["model"],
            row["lengths"],
            str(row["group"]),
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        job = json.loads(given.child)
        found = RUNNERS[job["who"]](Case(**job["case"]), Path(job["folder"]))
        Path(given.json).write_text(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for case in cases(given.device, quick=given.quick):
        words = (case.model, case.lengths, str(case.group))
        if all(word in words for word in given.only.split()):
            case = replace(case, peer_compile=given.peer_compile)
            rows.append(compare(case, rounds=1 if given.quick else 2))
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
