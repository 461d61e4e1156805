"""Accuracy over minutes of training: ours and TRL + vLLM from one model, with the same settings.

Ours evaluates itself as it goes, on the first test problems, greedily; its clock is the sum of
``time/step``, without evaluating and writing. TRL saves its weights as often, its clock stands
still meanwhile, and our evaluation of the same problems reads them afterwards.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from real_cases import Row, Work, steps_case

BETAS = (0.9, 0.95)


def task_of(work: Work) -> dict[str, Any]:
    """GSM8K with the first test problems alone."""
    return {"name": "gsm8k", "path": work.gsm8k, "num_test": work.problems}


def train_ours(work: Work) -> Iterator[Row]:
    """GRPO without a KL penalty, evaluated at every point."""
    import posttrain

    folder = Path(work.folder) / "curve_ours"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    posttrain.rl(
        model=work.weights,
        task=task_of(work),
        folder=folder,
        evaluate=False,
        model_options={"compile": work.device == "cuda"},
        algorithm="grpo",
        kl={"placement": "none"},
        steps=work.steps,
        prompts_per_step=work.prompts,
        group_size=work.group,
        max_new_tokens=work.new_tokens,
        learning_rate=work.learning_rate,
        adam_betas=BETAS,
        evaluate_every=work.every,
        evaluate_problems=work.problems,
        save_every=0,
        check="off",
    )
    yield trained(began)


def train_trl(work: Work) -> Iterator[Row]:
    """The same with TRL and vLLM in one process; its weights are kept at every point."""
    import torch  # noqa: F401 - before anything of ours
    from grpo_steps import text_of, trl_parts
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from posttrain.rewards.scorer import RewardScorer
    from posttrain.tasks import make_task

    task = make_task(task_of(work))
    scorer = RewardScorer(task.rewards)
    asked = {prompt.id: prompt for prompt in task.prompts("train")}
    points = Path(work.folder) / "curve_trl"
    shutil.rmtree(points, ignore_errors=True)
    points.mkdir()

    def reward(completions: list[Any], number: list[str], **_: Any) -> list[float]:
        texts = map(text_of, completions)
        scores = [scorer.score_text(asked[n], t) for n, t in zip(number, texts, strict=True)]
        return [score.value if score.ok else 0.0 for score in scores]

    class Keep(TrainerCallback):
        """Weights and minutes at every point; the clock stands still while they are written."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            at = time.perf_counter()
            print(f"step {state.global_step}: {at - self.began:.1f} s", flush=True)
            if state.global_step % work.every == 0:
                keep(work, points / f"{state.global_step}", given["model"])
                with (points / "minutes.jsonl").open("a") as lines:
                    told = {"step": state.global_step, "minutes": (at - self.began) / 60}
                    lines.write(json.dumps(told) + "\n")
            self.began += time.perf_counter() - at

    given = trl_parts(
        steps_case(work, share=work.share if work.device == "cuda" else 0.0),
        work.weights,
        rows=[{"prompt": prompt.text, "number": name} for name, prompt in asked.items()],
        max_steps=work.steps,
        learning_rate=work.learning_rate,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        vllm_importance_sampling_correction=True,
    )
    began = time.perf_counter()
    GRPOTrainer(reward_funcs=reward, callbacks=[Keep()], **given).train()
    yield trained(began)


def keep(work: Work, folder: Path, model: Any) -> None:
    """The weights as a model folder, with the tokenizer and end tokens of the first one."""
    unwrapped = getattr(model, "module", model)
    unwrapped.save_pretrained(folder)
    for file in work.weights.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
            shutil.copy(file, folder)


def trained(began: float) -> Row:
    """That a training is over."""
    return {"what": "training", "case": "", "way": "", "seconds": time.perf_counter() - began}


def evaluate(work: Work) -> Iterator[Row]:
    """The points of both curves, as far as they have come."""
    import posttrain

    lines = (Path(work.folder) / "curve_ours" / "rl" / "metrics.jsonl").read_text().splitlines()
    minutes, first = 0.0, None
    for record in map(json.loads, lines):
        minutes += record.get("time/step", 0.0) / 60
        if record.get("eval/accuracy") is not None:
            first = record["eval/accuracy"] if first is None else first
            yield point("posttrain", record["step"], minutes=minutes, found=record["eval/accuracy"])
    if first is not None:
        yield point("TRL + vLLM", 0, minutes=0.0, found=first)
    points = Path(work.folder) / "curve_trl"
    kept = points / "minutes.jsonl"
    for line in kept.read_text().splitlines() if kept.is_file() else ():
        told = json.loads(line)
        found = posttrain.evaluate(
            points / str(told["step"]),
            task=task_of(work),
            problems=work.problems,
            max_new_tokens=work.new_tokens,
        )
        accuracy = found.estimates["accuracy"].value
        yield point("TRL + vLLM", told["step"], minutes=told["minutes"], found=accuracy)


def point(who: str, step: int, *, minutes: float, found: float) -> Row:
    """A point of a curve."""
    told = {"step": step, "minutes": minutes, "accuracy": found}
    return {"what": "curve", "case": "", "way": "", "who": who, **told}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Accuracy over minutes, one panel for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    points = [row for row in rows if row["what"] == "curve"]
    models = sorted({row["model"] for row in points})
    figure, axes = plt.subplots(
        1, len(models), figsize=(6.4 * len(models), 4), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        for who in ("posttrain", "TRL + vLLM"):
            own = [row for row in points if row["model"] == model and row["who"] == who]
            own.sort(key=lambda row: row["step"])
            at, found = [row["minutes"] for row in own], [row["accuracy"] for row in own]
            axis.plot(at, found, marker="o", markersize=4, label=who)
        axis.set_title(f"{model}: GSM8K, greedy", loc="left", fontsize=11)
        axis.set_xlabel("minutes of training (evaluating and saving not counted)")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.grid(axis="y", color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(file, dpi=120)
    print(f"{file}: {len(points)} points")


CURVE_JOBS: dict[str, tuple[str, str, Callable[[Work], Iterator[Row]]]] = {
    "curve posttrain": ("posttrain", "posttrain", train_ours),
    "curve trl-vllm": ("TRL + vLLM", "trl-vllm", train_trl),
    "curve evaluate": ("posttrain", "posttrain", evaluate),
}
