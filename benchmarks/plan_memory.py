"""The memory that posttrain plan predicts, beside what real steps take.

    python benchmarks/plan_memory.py --device cuda --json plan_memory.json
    python benchmarks/plan_memory.py --device cuda --limit 8GB      # 1.5B with LoRA in so much
    python benchmarks/plan_memory.py --device cpu --quick
    python benchmarks/plan_memory.py --show benchmarks/plan_memory.json     # docs/memory.md

A case is a model of a known shape with random weights, and a way to train it: full fine-tuning,
LoRA of rank 16, PPO with a critic and a reference of their own; GRPO where nothing else is said. A
step samples in slots (on a GPU), asks reference and critic, and learns. Measured is the most that
was allocated at once in the last step, with what CUDA graphs keep; on a CPU the profiler's peak of
asking and learning, beside weights, gradients and moments. Nothing here is tuned to what was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from grpo_steps import peak
from memory import peak_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.losses.value import squared
from posttrain.algorithms.objective import with_values
from posttrain.algorithms.weights import token_mean
from posttrain.estimate.parts import CONTEXT, Footprint, footprint
from posttrain.estimate.work import Work
from posttrain.fast.score import checkpoint_activations, compile_layers
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.adapters import AdapterSettings, add_adapters, round_base
from posttrain.models.critic import separate_critic
from posttrain.models.frozen import Reference
from posttrain.models.gpu_memory import limit_memory, parse_size
from posttrain.models.load import Policy
from posttrain.models.outline import SHAPES, find_config, outline, shape_config
from posttrain.protocols import Objective, Outputs
from posttrain.rollout.engines.native import NativeEngine
from posttrain.types import Batch, Prompt, Sampling, Terms

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA 16": {"adapter": AdapterSettings(rank=16)},
    "PPO": {"critic": "separate", "reference": Reference()},
    "checkpointed": {"checkpointed": True},
    "compiled": {"compiled": True},
    "8-bit moments": {"moments": "8bit"},
}
# What the head of Qwen2.5-Coder-0.5B's GGUF file is: stored apart from the embedding.
UNTIED = {"qwen2.5-0.5b": {"tied": False}}
ON_GPU = ["tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-1b"]
USUAL = ["full", "LoRA 16", "PPO"]
MORE = [
    ("smollm2-135m", "compiled"),
    ("llama-3.2-1b", "compiled"),
    ("qwen2.5-1.5b", "checkpointed"),
]
SIZES = {"prompts": 16, "group": 8, "prompt_tokens": 128, "new_tokens": 128}
SMALL = {"prompts": 4, "group": 4, "prompt_tokens": 64, "new_tokens": 64}


@dataclass(frozen=True)
class Case:
    """A shape and a way."""

    shape: str
    way: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.way}"


def config_of(shape: str) -> Any:
    """The configuration of a shape."""
    if shape == "tiny":
        return find_config("tiny")
    return shape_config(**{**SHAPES[shape], **UNTIED.get(shape, {})})


def make_policy(work: Work) -> Policy:
    """A policy with random weights, made where it is used."""
    with torch.device(work.device):
        model = outline(work.config, dtype=work.dtype)
    if work.adapter is not None:
        add_adapters(model, work.adapter, seed=0)
        if work.compute == torch.bfloat16:
            round_base(model, work.compute)
    checkpoint_activations(model, enabled=work.checkpointed)
    if work.compiled:
        compile_layers(model)
    nobody: Any = None
    return Policy(model=model, tokenizer=nobody, source="", end_tokens=(0,), pad_token=0)


def make_learner(work: Work, policy: Policy) -> LocalLearner:
    """The learner of a case, as a run has it."""
    critic = None
    if work.critic is not None:
        module = separate_critic(policy)
        critic = Trained(module, adamw(module, learning_rate=1e-6, moments=work.moments))
    return LocalLearner(
        policy.model,
        adamw(policy.model, learning_rate=1e-6, moments=work.moments),
        save=lambda folder: None,
        micro_batch_tokens=work.micro_batch_tokens,
        compute=work.compute,
        reference=work.reference,
        critic=critic,
        captured=work.captured,
    )


def make_batch(work: Work) -> Batch:
    """Completions as long as they may be."""
    drawn = torch.Generator().manual_seed(0)
    most = work.config.get_text_config().vocab_size
    asked = torch.randint(3, most, (work.prompts, work.prompt_tokens), generator=drawn)
    said = torch.randint(3, most, (work.sequences, work.new_tokens), generator=drawn)
    tokens = torch.cat([asked.repeat_interleave(work.group, 0), said], 1)
    mask = (torch.arange(work.longest) >= work.prompt_tokens).expand(tokens.shape).clone()
    numbers = torch.randn(tokens.shape, generator=drawn) * mask
    return token_mean(
        Batch(
            tokens=tokens,
            mask=mask,
            attention=torch.ones_like(mask),
            groups=torch.arange(work.prompts).repeat_interleave(work.group),
            advantages=numbers,
            returns=numbers,
            sampler_logprobs=torch.zeros(tokens.shape),
        )
    )


@Objective
def objective(outputs: Outputs, batch: Batch) -> Terms:
    """The clipped loss, and the critic's where there is one."""
    terms = clipped(outputs.need("logprobs"), batch)
    if outputs.values is None:
        return terms
    return with_values(terms, squared(outputs.values, batch), coefficient=1.0)


class Steps:
    """Steps of a case: sampling, asking, learning."""

    def __init__(self, work: Work) -> None:
        self.work = work
        policy = make_policy(work)
        self.batch = make_batch(work)
        self.learner = make_learner(work, policy)
        length = work.prompt_tokens
        self._prompts = [
            Prompt(id=str(row), text="", tokens=tuple(self.batch.tokens[row].tolist()[:length]))
            for row in range(0, work.sequences, work.group)
        ]
        self._engine = NativeEngine(
            policy.model,
            end_tokens=(),  # none: completions are as long as they may be
            decode=lambda tokens: "",
            compute=work.compute if work.compute != torch.float32 else None,
            compiled=work.compiled,
        )

    def sample(self) -> None:
        """Completions of all prompts, which are thrown away: their lengths are known."""
        sampling = Sampling(max_new_tokens=self.work.new_tokens)
        count = self.work.group
        self._engine.generate(self._prompts, sampling, num_samples=count, seed=0)

    def learn(self) -> None:
        """Ask, where something is asked, and take an optimiser step."""
        batch = self.batch
        if self.work.reference is not None or self.work.critic is not None:
            batch = self.learner.infer(batch)
        self.learner.step(batch, objective)

    def resting(self) -> int:
        """Bytes of weights and moments, with the gradients cleared."""
        learner = self.learner
        parts = [part for part in (learner.trained, learner.critic) if part is not None]
        found: list[Any] = [w for part in parts for w in part.module.parameters()]
        for part in parts:
            part.clear()
            found += [v for s in part.optimizer.state.values() for v in s.values()]
        if learner.reference is not None:
            found += learner.reference.weights().values()
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(work: Work) -> dict[str, Any]:
    """The peak of the last of three steps."""
    steps = Steps(work)
    began = time.perf_counter()
    if work.device == "cpu":
        steps.sample()
        steps.learn()
        rests = steps.resting()  # without gradients: the profiler does not see them freed
        found: dict[str, Any] = {"peak": rests + peak_bytes(steps.learn, torch.device("cpu"))}
    else:
        for number in range(3):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
            steps.sample()
            steps.learn()
        torch.cuda.synchronize()
        found = peak("cuda")
    seconds = time.perf_counter() - began
    return {**found, "seconds": seconds, "micro_batch_tokens": steps.learner.micro_batch_tokens}


def work_of(case: Case, *, device: str, sizes: dict[str, int], micro: int | str) -> Work:
    """The work of a case."""
    chosen: Any = micro
    return Work(
        config=config_of(case.shape),
        device="cuda" if device == "cuda" else "cpu",
        compute=torch.bfloat16 if device == "cuda" else torch.float32,
        micro_batch_tokens=chosen,
        samples_here=device == "cuda",
        **sizes,
        **WAYS[case.way],
    )


def compare(case: Case, work: Work, *, memory: float) -> dict[str, Any]:
    """What is predicted of a case, and what it took."""
    predicted = footprint(work, memory)
    row: dict[str, Any] = {"case": str(case), "predicted": expected(predicted, work)}
    row |= {"parts": predicted.stays, "learning": predicted.learning, "phases": predicted.peaks}
    row["predicted_micro_batch_tokens"] = predicted.micro_batch_tokens
    try:
        row |= measure(work)
        row["ratio"] = row["predicted"] / row["peak"]
    except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
    return row


def expected(found: Footprint, work: Work) -> float:
    """The peak as it is measured: on a CPU, sampling is not."""
    if work.device == "cuda":
        return found.peak
    return max(found.peaks["learning"], found.peaks["asking"])


def show(rows: list[dict[str, Any]], *, device: str) -> None:
    table = Table(title=f"peak of a step on {device}, GiB", box=SIMPLE_HEAD)
    for name in ("case", "predicted", "measured", "ratio", "micro-batch", "seconds"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        predicted = f"{row['predicted'] / 2**30:.3f}"
        if "failed" in row:
            table.add_row(row["case"], predicted, row["failed"], "", "", "")
            continue
        tokens = f"{row['predicted_micro_batch_tokens']:,} / {row['micro_batch_tokens']:,}"
        numbers = (f"{row['peak'] / 2**30:.3f}", f"{row['ratio']:.3f}")
        table.add_row(row["case"], predicted, *numbers, tokens, f"{row['seconds']:.2f}")
    Console(width=120).print(table)


def beside(file: Path) -> list[dict[str, Any]]:
    """Peaks that were measured, each beside what is predicted of its case by now."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    rows = []
    for row in kept["rows"]:
        case = Case(*row["case"].split(", "))
        work = work_of(case, device="cuda", sizes=SIZES, micro=row["micro_batch_tokens"])
        predicted = footprint(work, kept["memory"]).peak
        rows.append({**row, "predicted": predicted, "ratio": predicted / row["peak"]})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of the docs."""
    lines = ["| shape, way | predicted, GiB | measured, GiB | ratio |", "|---|---:|---:|---:|"]
    for row in rows:
        sizes = [f"{row[name] / 2**30:.2f}" for name in ("predicted", "peak")]
        lines.append(f"| {row['case']} | {' | '.join(sizes)} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def limited(text: str) -> list[dict[str, Any]]:
    """A 1.5B with LoRA, which chooses its own micro-batches, in a part of the GPU."""
    case, memory = Case("qwen2.5-1.5b", "LoRA 16"), parse_size(text)
    limit_memory("cuda", int(memory - CONTEXT))  # a card's driver takes its part of it too
    sizes = {"prompts": 16, "group": 8, "prompt_tokens": 256, "new_tokens": 256}
    work = work_of(case, device="cuda", sizes=sizes, micro="auto")
    rows = [compare(case, replace(work, checkpointed=True), memory=memory)]
    rows[0]["case"] += f", checkpointed, in {text}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=ON_GPU, help="of these alone")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="in these ways alone")
    parser.add_argument("--micro", type=int, default=4096, help="tokens of a micro-batch; 0: auto")
    parser.add_argument("--limit", metavar="8GB", help="a 1.5B with LoRA in so much of the GPU")
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, short rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only compare what is in it")
    given = parser.parse_args()
    if given.show:
        print(markdown(beside(given.show)))
        return
    torch.manual_seed(0)
    if given.limit:
        rows = limited(given.limit)
    else:
        cuda = given.device == "cuda"
        shapes = given.shapes or (["tiny"] if given.quick or not cuda else ON_GPU)
        cases = [Case(shape, way) for shape in shapes for way in given.ways or USUAL]
        if cuda and not (given.shapes or given.ways or given.quick):
            cases += [Case(*more) for more in MORE]
        sizes, micro = (SMALL, 512) if given.quick else (SIZES, given.micro or "auto")
        memory = float(torch.cuda.mem_get_info()[1]) if cuda else 16.0 * 2**30
        make = partial(work_of, device=given.device, sizes=sizes, micro=micro)
        rows = [compare(case, make(case), memory=memory) for case in cases]
    show(rows, device=given.device)
    if given.json is not None:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        memory = torch.cuda.mem_get_info()[1] if given.device == "cuda" else None
        report = {"device": name, "memory": memory, "torch": torch.__version__, "rows": rows}
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
