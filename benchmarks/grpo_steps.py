"""Whole GRPO steps of posttrain and of TRL on one workload, for compare_trl.py and real_models.py.

TRL samples with the ``generate`` of transformers, or with vLLM in the same process and on the same
GPU (``peer_share`` of its memory).
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATE = 1e-12  # all the work of learning, and completions that stay as long as they were
LONGEST_PROMPT = 768  # tokens that vLLM inside TRL has room for, beside the completion


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
    busy: bool = False
    seed: int = 0
    questions: str = ""  # a JSON file of them; empty: random letters
    peer_share: float = 0.0  # of the GPU's memory, for vLLM inside TRL; 0: without vLLM
    lora: int = 0  # the rank of adapters beside all linear layers; 0: all weights learn

    @property
    def sequences(self) -> int:
        """Completions in a step."""
        return self.prompts * self.group

    @property
    def texts(self) -> list[str]:
        """Four times as many prompts as a step takes."""
        if self.questions:
            return json.loads(Path(self.questions).read_text())[: 4 * self.prompts]
        from bench_models import prompts

        return prompts(self.prompts * 4, ragged=self.lengths == "ragged", seed=self.seed)


class Clock:
    """When each step's completions were scored, by a reward that both libraries call."""

    def __init__(self, case: Case) -> None:
        self.times: list[float] = []
        self._case = case
        self._seen = 0

    def score(self, text: str) -> float:
        """A reward that differs within nearly every group."""
        if self._seen % self._case.sequences == 0:
            if len(self.times) == self._case.warmup and self._case.device == "cuda":
                import torch

                torch.cuda.reset_peak_memory_stats()
            self.times.append(time.perf_counter())
        self._seen += 1
        return sum(map(ord, text)) % 17 / 17

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        return statistics.median(gaps[self._case.warmup :])


def run_ours(case: Case, folder: Path) -> dict[str, Any]:
    """posttrain, as a program has it that imports it first."""
    import posttrain  # before torch: OpenMP reads but once how its threads are to wait

    clock = Clock(case)

    def reward(completion: str) -> float:
        return clock.score(completion)

    result = posttrain.rl(
        model=folder,
        prompts=case.texts,
        reward=reward,
        grading={"workers": 0},
        model_options={"compile": case.device == "cuda"},
        adapter={"rank": case.lora},
        folder=folder / f"run{time.time_ns()}",
        algorithm="grpo",
        kl={"placement": "none"},
        steps=case.steps + case.warmup + 1,
        prompts_per_step=case.prompts,
        group_size=case.group,
        max_new_tokens=case.new_tokens,
        learning_rate=RATE,
        check="off",
    )
    rows = result.metrics().to_pylist()[case.warmup :]
    names = ("time/rollout", "time/reward", "time/train", "rollout/length")
    split = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
    return {"seconds": clock.seconds, **peak(case.device), "split": split}


def run_trl(case: Case, folder: Path) -> dict[str, Any]:
    """TRL at its best settings for this workload."""
    import torch  # before anything of ours
    from trl import GRPOTrainer

    clock = Clock(case)
    sampled: list[float] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [clock.score(text_of(completion)) for completion in completions]

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate(*args, **kwargs)
            sampled.append(time.perf_counter() - began)
            return found

    rows = [{"prompt": text} for text in case.texts]
    trainer = Timed(reward_funcs=reward, **trl_parts(case, folder, rows=rows))
    learned = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in learned} == {torch.float32}
    trainer.train()
    rollout = statistics.median(sampled[case.warmup :])
    mean = [row["completions/mean_length"] for row in trainer.state.log_history if "loss" in row]
    split = {"time/rollout": rollout, "rollout/length": statistics.median(mean)}
    return {"seconds": clock.seconds, **peak(case.device), "split": split}


def trl_parts(
    case: Case, folder: Path, *, rows: Sequence[dict[str, Any]], **changes: Any
) -> dict[str, Any]:
    """What a GRPOTrainer is made of, but for the reward; ``changes`` are other settings."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.chat_template:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    micro = case.peer_micro_batch
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": case.sequences // micro,
        "num_generations": case.group,
        "max_completion_length": case.new_tokens,
        "max_steps": case.steps + case.warmup + 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "beta": 0.0,
        "loss_type": "grpo",
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "bf16": case.device == "cuda",
        "use_cpu": case.device == "cpu",
        "gradient_checkpointing": False,
        "torch_compile": case.peer_compile,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": case.device == "cuda",
        "model_init_kwargs": {"dtype": "float32"},
    }
    peft: dict[str, Any] = {}
    if case.lora:
        from peft import LoraConfig

        peft["peft_config"] = LoraConfig(
            r=case.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        if case.device == "cuda":  # the base in the type of the products, as ours is
            settings["model_init_kwargs"] = {"dtype": "bfloat16"}
    return {
        "model": str(folder),
        "processing_class": tokenizer,
        "args": GRPOConfig(**settings | vllm_settings(case) | changes),
        "train_dataset": Dataset.from_list(list(rows)),
        **peft,
    }


def vllm_settings(case: Case) -> dict[str, Any]:
    """vLLM inside TRL: in its process, on its GPU."""
    if not case.peer_share:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": case.peer_share,
        "vllm_max_model_length": LONGEST_PROMPT + case.new_tokens,
        "vllm_importance_sampling_correction": False,  # it would cost a pass over the batch
    }


def text_of(completion: Any) -> str:
    """A completion of TRL as text: of a chat it is a list of messages.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "4"}])
    ('4', '4')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def peak(device: str) -> dict[str, int]:
    """The most memory in use during the measured steps on a GPU, CUDA graphs included.

    ``reserved`` is the most that PyTorch took from the GPU, with all that was only in reserve; no
    more than that can have been in use, though the sum says so where a graph was captured. On a
    CPU both are the most that the whole process ever had. ``device_used`` is what was taken of the
    GPU at the end, by libraries that do not ask PyTorch too.
    """
    if device == "cpu":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak": most, "reserved": most}
    import torch

    from posttrain.models.gpu_memory import captured_bytes

    used = torch.cuda.max_memory_allocated() + captured_bytes("cuda")
    reserved = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return {"peak": min(used, reserved), "reserved": reserved, "device_used": total - free}


RUNNERS: dict[str, Callable[[Case, Path], dict[str, Any]]] = {"ours": run_ours, "peer": run_trl}
