"""A user's script that calls every public function: ``mypy --strict`` has nothing to say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain


def right(completion: str, answer: str) -> float:
    """A reward of one's own."""
    return float(completion == answer)


def watched(done: posttrain.StepDone) -> Mapping[str, float] | posttrain.Stop | None:
    """Own numbers, an own evaluation, an early end."""
    if done.metrics["reward/mean"] > 0.9:
        return posttrain.Stop("good enough", {"own/best": done.metrics["reward/mean"]})
    answers = done.generate(["2+2="], max_new_tokens=4, num_samples=2, temperature=1.0)
    return {"own/steps": float(len(done.history)), "own/length": float(len(answers[0].text))}


def main(place: Path) -> None:
    """Every function, with options of every section."""
    rows: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}]
    warm = posttrain.sft(
        model="tiny",
        data=[{"prompt": "1+1=", "completion": "2"}],
        test_data=[{"prompt": "2+2=", "completion": "4"}],
        epochs=2,
        learning_rate=1e-3,
        schedule="constant",
        run_options={"trackers": ["tensorboard", {"name": "wandb", "project": "sums"}]},
        model_options={"dtype": "float32", "options": {"hidden_size": 32}},
        adapter={"rank": 8, "alpha": 16.0, "targets": ["q_proj"]},
    )
    run = posttrain.rl(
        model=warm.model,
        prompts=rows,
        test_prompts=place / "test.jsonl",
        reward={right: 1.0, "length": {"weight": 0.1, "target": 1}, "model": {"path": place}},
        evaluate={"problems": 50, "samples": 4},
        algorithm="grpo",
        steps=100,
        group_size=8,
        kl={"coefficient": 0.01, "placement": "loss"},
        critic={"kind": "shared", "coefficient": 0.5},
        curriculum={"low": 0.1, "high": 0.9},
        loss={"name": "clipped", "clip_high": 0.28},
        stop=["\n"],
        grading={"workers": 0, "seconds": 5.0},
        environment={"max_turns": 4},
        cluster={"learners": 2, "engines": 1},
        teacher={"model": place, "dtype": "bfloat16"},
        sweep=[{"rl.learning_rate": 1e-4}],
        callbacks=[watched],
        folder=place / "rl",
        overwrite=True,
        seed=1,
    )
    pairs = posttrain.prefer(model=run.model, prompts=rows, reward=right, samples=4, error_rate=0.1)
    posttrain.reward(model=run.model, data=pairs.folder.path / "prefer/pairs.jsonl", epochs=2)
    posttrain.dpo(model="tiny", data=[{"chosen": "a", "rejected": "b"}], loss="ipo", beta=0.1)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    found = posttrain.evaluate(model, tokenizer=tokenizer, task="arithmetic", samples=8)
    print(found.accuracy, run.summary["stages"], run.metrics(), run.samples(1), run.plot())
    print(posttrain.generate(run.model, "1+1=", temperature=1.0, num_samples=2)[0].text)
    print(posttrain.play("tiny", "calculator", prompt="1+1=", max_turns=2).score)
