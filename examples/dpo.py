"""Preferences without a reward model: DPO and its kin side by side, offline and on-policy.

    python examples/dpo.py [--folder runs/dpo_kin] [--seed 0] [--quick]

The stages of recipes/dpo.toml up to the preferences are run once. Then every loss learns from the
same pairs; and DPO in three rounds, each from a third as many pairs that its own model was asked
for. The table has the hidden true score of held-out melodies, sampled at temperature 1, and the
divergence from the SFT model (examples/rlhf.py measures PPO in the same way).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

import posttrain
from posttrain.data.collate import collate
from posttrain.fast.score import score_tokens
from posttrain.models.load import load_policy

RECIPE = Path(__file__).parents[1] / "recipes" / "dpo.toml"
# Each loss has a scale of its own; the steps are the same.
LOSSES = {
    "DPO": [],
    "DPO, label_smoothing = 0.1": ["--dpo.label_smoothing", "0.1"],
    "IPO": ["--dpo.loss", "ipo", "--dpo.beta", "0.5"],
    "KTO": ["--dpo.loss", "kto", "--dpo.batch_size", "128"],
    "ORPO": ["--dpo.loss", "orpo", "--dpo.beta", "1"],
    "SimPO": ["--dpo.loss", "simpo"],
}
ROUNDS = 3
QUICK = ["--sft.num_demonstrations", "2000", "--sft.epochs", "1", "--prefer.repeats", "1"]


def main() -> None:
    """Run everything, print the table and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/dpo_kin"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--repeats", type=int, default=32, help="pairs asked for of each prompt")
    parser.add_argument("--only", nargs="*", default=[*LOSSES], help="losses, by their names here")
    given = parser.parse_args()
    folder: Path = given.folder
    options = ["--run.seed", str(given.seed), "--prefer.repeats", str(given.repeats)]
    options += QUICK if given.quick else []
    base = folder / "base"
    run(options, stages="sft,prefer", folder=base)
    start, pairs = base / "sft" / "model", base / "prefer" / "pairs.jsonl"
    rows = {"SFT": measure(start, reference=start)}
    for number, name in enumerate(given.only):
        place = folder / f"loss_{number}"
        learn(start, pairs, place=place, options=[*options, *LOSSES[name]])
        rows[name] = measure(place / "dpo" / "model", reference=start)
    model = start
    for number in range(1, ROUNDS + 1):
        asked, place = folder / f"asked_{number}", folder / f"round_{number}"
        fewer = [] if given.quick else ["--prefer.repeats", str(given.repeats // ROUNDS)]
        run([*of(model), *options, *fewer], stages="prefer", folder=asked)
        learn(model, asked / "prefer" / "pairs.jsonl", place=place, options=options)
        model = place / "dpo" / "model"
        rows[f"DPO, on-policy, round {number}"] = measure(model, reference=start)
    (folder / "summary.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    print("| held-out melodies | true score | KL to SFT | notes |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['true_score']:.2f} | {row['kl']:.1f} | {row['length']:.1f} |")


def of(model: Path) -> list[str]:
    """The options that begin with another model than the recipe's."""
    return ["--model.name", str(model), "--model.options", "{}"]


def run(options: list[str], *, stages: str, folder: Path) -> None:
    """Stages of the recipe; stop where one fails."""
    words = [sys.executable, "-m", "posttrain.cli", "run", str(RECIPE), "--run.stages", stages]
    subprocess.run([*words, "--run.folder", str(folder), *options], check=True, stdout=sys.stderr)


def learn(model: Path, pairs: Path, *, place: Path, options: list[str]) -> None:
    """The stage dpo on a file of pairs; a tenth of their prompts is held out."""
    run([*of(model), "--dpo.data", str(pairs), *options], stages="dpo", folder=place)


@torch.no_grad()
def measure(model: Path, *, reference: Path) -> dict[str, float]:
    """True score, divergence and length on held-out prompts, from samples at temperature 1."""
    found = posttrain.evaluate(model, task="melody", samples=4, max_new_tokens=24)
    scores = [rollout.score.value for rollout in found.sampled if rollout.score is not None]
    policy = load_policy(str(reference))
    batch = collate(found.sampled, pad_token=policy.pad_token)
    logprobs = score_tokens(policy.model, batch).need("logprobs")
    gap = (batch.need("sampler_logprobs") - logprobs)[batch.mask].sum()
    return {
        "true_score": sum(scores) / len(scores),
        "kl": float(gap) / len(found.sampled),
        "length": sum(len(rollout.text) for rollout in found.sampled) / len(found.sampled),
    }


if __name__ == "__main__":
    main()
