"""The jobs of real_models.py: one model, one engine or library, in a process of its own.

Every job gives its rows one by one; what it has given is kept if it is cut short.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CASES = ("fixed", "ragged")  # every completion as long as it may; or ending where the model ends it
FULL = {"cuda": 0.9, "cpu": 0.2}  # of the memory, for an engine that has the device alone


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model and the size of the work; ``folder`` is where what jobs share is kept."""

    model: str
    source: str
    gsm8k: str
    folder: str
    device: str
    prompts: int
    group: int
    new_tokens: int
    rounds: int
    steps: int
    micro_batch: int = 64
    share: float = 0.3
    learning_rate: float = 2e-6
    every: int = 5
    problems: int = 500

    @property
    def weights(self) -> Path:
        """The Hugging Face folder that everyone reads."""
        return Path(self.folder) / "model"

    def read(self, name: str) -> Any:
        """What another job has left."""
        file = Path(self.folder) / f"{name}.json"
        if not file.is_file():
            raise SystemExit(f"{file} is missing: run the job that writes it first")
        return json.loads(file.read_text())

    def write(self, name: str, content: Any) -> None:
        """Leave something for other jobs."""
        (Path(self.folder) / f"{name}.json").write_text(json.dumps(content))


def prepare(work: Work) -> Iterator[Row]:
    """The model as a folder in bfloat16, and the questions as text and as tokens."""
    import posttrain  # noqa: F401 - before torch: OpenMP reads but once how its threads wait

    # isort: split
    from roofline import Shape, find_peak

    from posttrain.build.model_source import import_gguf
    from posttrain.data.template import Template
    from posttrain.models.load import load_policy
    from posttrain.models.save import save_policy
    from posttrain.tasks import make_task

    began = time.perf_counter()
    if not work.weights.is_dir():
        if Path(work.source).is_file():
            import_gguf(work.source, work.weights, dtype="bfloat16")
        else:
            save_policy(load_policy(work.source, dtype="bfloat16"), work.weights)
    policy = load_policy(str(work.weights), dtype="bfloat16")
    task = make_task({"name": "gsm8k", "path": work.gsm8k})
    asked = task.prompts("train")[: 4 * work.prompts]
    chat = bool(policy.tokenizer.chat_template)
    template = Template(policy.tokenizer, chat=chat, end_tokens=policy.end_tokens)
    template.prepare(asked)
    tokens = [template.render(prompt).tokens for prompt in asked]
    work.write("questions", [prompt.text for prompt in asked])
    work.write("prompts", {"tokens": tokens, "end_tokens": policy.end_tokens})
    peak = find_peak(work.device, precision(work))
    found = {"shape": vars(Shape.of(policy.model)), "peak": vars(peak)}
    work.write("counting", found)
    yield {
        "what": "prepare",
        "case": "",
        "way": "",
        "seconds": time.perf_counter() - began,
        "weights": sum(weight.numel() for weight in policy.model.parameters()),
        "mean_prompt": statistics.mean(map(len, tokens)),
        **found,
    }


def sampling_ours(work: Work) -> Iterator[Row]:
    """Our engine, compiled on a GPU; what it sampled is kept for learning."""
    import posttrain  # noqa: F401 - before torch

    # isort: split
    from samplers import Native, Setup, set_threads

    from posttrain.models.load import load_policy

    set_threads(work.device)
    policy = load_policy(str(work.weights))
    cuda = work.device == "cuda"
    setup = Setup(
        model=policy.model,
        tokenizer=policy.tokenizer,
        device=work.device,
        compute=precision(work),
    )
    engine = Native(setup, compiled=cuda)
    for case in CASES:
        yield sampled(engine, work, case=case, way="compiled" if cuda else "")
        work.write(case, [[[*one.tokens] for one in group] for group in engine.found])
    engine.close()


def sampling_vllm(work: Work) -> Iterator[Row]:
    """vLLM alone on the GPU, with the log-prob of every token drawn and without."""
    from samplers import Setup
    from sampling_peers import Vllm

    setup = Setup(
        model=None,
        tokenizer=None,
        device=work.device,
        compute=precision(work),
        folder=work.weights,
    )
    longest = max(map(len, work.read("prompts")["tokens"]))
    engine = Vllm(
        setup,
        share=FULL[work.device],
        max_model_len=longest + work.new_tokens + 1,
        max_num_seqs=work.prompts * work.group,
    )
    for way in ("log-probs", "no log-probs"):
        engine.logprobs = way == "log-probs"
        for case in CASES:
            yield sampled(engine, work, case=case, way=way)


def sampled(engine: Any, work: Work, *, case: str, way: str) -> Row:
    """Tokens a second of an engine, and its share of the roofline."""
    from rollout import describe
    from roofline import Peak, Shape
    from samplers import Job

    given, counting = work.read("prompts"), work.read("counting")
    job = Job(
        prompts=[tuple(tokens) for tokens in given["tokens"][: work.prompts]],
        group=work.group,
        new_tokens=work.new_tokens,
        end_tokens=() if case == "fixed" else tuple(given["end_tokens"]),
    )
    began = time.perf_counter()
    entry: dict[str, Any] = {"settings": engine.prepare(job), "seconds": [], "rates": []}
    engine.sample(job, seed=1)  # not counted: memory, kernels, CUDA graphs
    start = time.perf_counter() - began
    for seed in range(work.rounds):
        taken, entry["lengths"] = engine.sample(job, seed=seed)
        entry["seconds"].append(taken)
        entry["rates"].append(sum(entry["lengths"]) / taken)
    told = describe(
        entry,
        job,
        shape=Shape(**counting["shape"]),
        peak=Peak(**counting["peak"]),
        size=precision(work).itemsize,
    )
    return {"what": "sampling", "case": case, "way": way, "start_s": start, **told}


def learning_ours(work: Work) -> Iterator[Row]:
    """A step of learning from what was sampled, and its share of the peak (MFU)."""
    import posttrain  # noqa: F401 - before torch

    # isort: split
    from learning import Bench
    from samplers import set_threads

    from posttrain.models.load import load_policy

    set_threads(work.device)
    cuda = work.device == "cuda"
    way = "compiled, captured" if cuda else "eager"
    bench = Bench(load_policy(str(work.weights)).model, way, device=work.device)
    asked = work.read("prompts")["tokens"][: work.prompts]
    for case in CASES:
        answers = work.read(case)
        batch = batch_of(asked, answers)
        groups = [
            (len(prompt), list(map(len, group)))
            for prompt, group in zip(asked, answers, strict=True)
        ]
        tokens = sum(sum(lengths) for _, lengths in groups)
        for micro in (0, 16384) if cuda else (0,):
            found = bench.measure(batch, micro, steps=work.rounds)
            yield {
                "what": "learning",
                "case": case,
                "way": f"{way}, {f'{micro:,} tokens' if micro else 'auto'}",
                "tokens_per_s": tokens / found["seconds"],
                "mfu": mfu(work, groups, seconds=found["seconds"]),
                **found,
            }


def mfu(work: Work, groups: Sequence[tuple[float, Sequence[float]]], *, seconds: float) -> float:
    """The share of the device's peak that learning from these lengths in that time has reached."""
    from roofline import Shape, operations_of

    counting = work.read("counting")
    count = operations_of(Shape(**counting["shape"]), groups)
    return sum(count.values()) / seconds / counting["peak"]["flops_per_second"]


def batch_of(asked: list[list[int]], answers: list[list[list[int]]]) -> Any:
    """Prompts and their sampled completions as a batch, with random advantages."""
    import torch

    from posttrain.algorithms.weights import token_mean
    from posttrain.data.collate import collate_demonstrations

    rows, groups = [], []
    for number, (prompt, group) in enumerate(zip(asked, answers, strict=True)):
        for answer in group:
            rows.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
            groups.append(number)
    torch.manual_seed(0)
    batch = collate_demonstrations(rows, pad_token=0)
    return token_mean(
        batch.replace(
            groups=torch.tensor(groups),
            advantages=torch.randn(len(rows), 1).expand(batch.mask.shape) * batch.mask,
            sampler_logprobs=torch.zeros(batch.mask.shape),
        )
    )


def steps_ours(work: Work) -> Iterator[Row]:
    """Whole GRPO steps."""
    from grpo_steps import run_ours

    yield steps_row(work, run_ours(steps_case(work), work.weights))


def steps_trl(work: Work) -> Iterator[Row]:
    """Whole GRPO steps of TRL, sampling with transformers."""
    from grpo_steps import run_trl

    found = run_trl(steps_case(work), work.weights)
    yield {**steps_row(work, found), "way": f"micro-batches of {work.micro_batch}"}


def steps_trl_vllm(work: Work) -> Iterator[Row]:
    """Whole GRPO steps of TRL, sampling with vLLM in the same process."""
    from grpo_steps import run_trl

    found = run_trl(steps_case(work, share=work.share), work.weights)
    way = f"micro-batches of {work.micro_batch}, {work.share} of the memory for vLLM"
    yield {**steps_row(work, found), "way": way}


def steps_case(work: Work, *, share: float = 0.0) -> Any:
    """The same steps for everyone."""
    from grpo_steps import Case

    return Case(
        model=work.model,
        lengths="ragged",
        group=work.group,
        prompts=work.prompts,
        new_tokens=work.new_tokens,
        steps=work.steps,
        warmup=2,
        device=work.device,
        peer_micro_batch=min(work.micro_batch, work.prompts * work.group),
        questions=str(Path(work.folder) / "questions.json"),
        peer_share=share,
    )


def steps_row(work: Work, found: Row) -> Row:
    """Samples a second, and what of the step was learning."""
    split = found["split"]
    sequences, length = work.prompts * work.group, split["rollout/length"]
    learning = split.get("time/train", found["seconds"] - split["time/rollout"])
    asked = statistics.mean(map(len, work.read("prompts")["tokens"]))
    return {
        "what": "steps",
        "case": "ragged",
        "way": "",
        "samples_per_s": sequences / found["seconds"],
        "tokens_per_s": sequences * length / found["seconds"],
        "mean_length": length,
        "sampling_s": split["time/rollout"],
        "sampling_tokens_per_s": sequences * length / split["time/rollout"],
        "learning_s": learning,
        "mfu": mfu(work, [(asked, [length] * work.group)] * work.prompts, seconds=learning),
        **found,
    }


def precision(work: Work) -> Any:
    """What everyone computes in."""
    import torch

    return torch.bfloat16 if work.device == "cuda" else torch.float32


JOBS: dict[str, tuple[str, str, Callable[[Work], Iterator[Row]]]] = {
    # name: whose row, the peer whose Python it needs, what is done
    "prepare": ("posttrain", "posttrain", prepare),
    "sampling posttrain": ("posttrain", "posttrain", sampling_ours),
    "sampling vllm": ("vLLM", "vllm", sampling_vllm),
    "learning posttrain": ("posttrain", "posttrain", learning_ours),
    "steps posttrain": ("posttrain", "posttrain", steps_ours),
    "steps trl": ("TRL", "trl", steps_trl),
    "steps trl-vllm": ("TRL + vLLM", "trl-vllm", steps_trl_vllm),
}
