"""Record what TRL's preference losses make of one batch, for tests/algorithms/fixtures.

Run with the Python of an environment that has TRL; the tests read the file alone::

    python -m venv trl && trl/bin/pip install --constraint constraints.txt trl
    trl/bin/python scripts/record_trl_losses.py

The log-probs are drawn here and given to TRL's own code in the place of a model's.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

PROMPT, LENGTHS = 2, (5, 3, 1, 6, 4, 4, 2, 7)  # pairs: rows 0 and 4, 1 and 5, 2 and 6, 3 and 7
LABELS = [True, True, False, True, False, False, True, False]
BETA, GAMMA, SMOOTHING, DESIRABLE, UNDESIRABLE = 0.3, 0.7, 0.2, 1.5, 0.5


class Device(SimpleNamespace):
    """Stands for accelerate on one process."""

    def gather_for_metrics(self, value: Any) -> Any:
        return value

    gather = gather_for_metrics


def model(*logprobs: torch.Tensor) -> Any:
    """Answers these log-probs, one call after the other."""
    left = list(logprobs)

    def call(**given: Any) -> Any:
        zero = torch.zeros_like(left[0])
        measured = {"entropy": zero, "mean_logits": zero, "is_top1": zero.bool()}
        return SimpleNamespace(log_probs=left.pop(0), **measured)

    return call


def trainer(**given: Any) -> Any:
    """What the loss reads of a trainer."""
    shared = {
        "model": SimpleNamespace(training=True),
        "accelerator": Device(device="cpu"),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "loss_weights": [1.0],
        "use_weighting": False,
        "beta": BETA,
        "label_smoothing": 0.0,
        "desirable_weight": DESIRABLE,
        "undesirable_weight": UNDESIRABLE,
        "calculate_KL": True,
        "alpha": 0.0,
        "simpo_gamma": GAMMA,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    }
    return SimpleNamespace(**{**shared, **given})


def main() -> None:
    """Write the fixture."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    size, width = len(LENGTHS), max(LENGTHS) + PROMPT
    mask = torch.zeros(size, width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = 1
    drawn = -torch.rand(4, size, width, generator=generator) * 2
    policy, reference, strange, strange_reference = (drawn * mask).unbind()
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }
    refs = reference.sum(1).chunk(2)
    found = {}
    for name in ("sigmoid", "ipo"):
        given = {**inputs, "ref_chosen_logps": refs[0], "ref_rejected_logps": refs[1]}
        self = trainer(loss_types=[name])
        found[name] = float(DPOTrainer._compute_loss(self, model(policy[:, 1:]), given, False))
    given = {
        **inputs,
        "KL_input_ids": torch.ones_like(mask),
        "KL_attention_mask": mask,
        "KL_completion_mask": mask,
        "label": torch.tensor(LABELS),
        "ref_logps": reference.sum(1),
        "ref_KL_logps": strange_reference.sum(1),
    }
    self = trainer(loss_type="kto")
    self._compute_kl_logps = lambda used, batch: KTOTrainer._compute_kl_logps(self, used, batch)
    asked = model(strange[:, 1:], policy[:, 1:])
    found["kto"] = float(KTOTrainer._compute_loss(self, asked, given, False))
    means = (policy.sum(1) / mask.sum(1)).chunk(2)
    simpo = CPOTrainer.cpo_loss(trainer(loss_type="simpo"), *means)[0]
    found["simpo"] = simpo.tolist()
    # ORPO's second term; the first is the likelihood, which TRL takes over prompts too.
    odds = ORPOTrainer.odds_ratio_loss(trainer(), *means)[0]
    found["orpo_odds"] = (-odds).tolist()
    ratios = (policy - reference).sum(1).chunk(2)
    smoothed = trainer(loss_type="sigmoid", label_smoothing=SMOOTHING)
    found["smoothed"] = CPOTrainer.cpo_loss(smoothed, *ratios)[0].tolist()
    record = {
        "trl": trl.__version__,
        "beta": BETA,
        "gamma": GAMMA,
        "label_smoothing": SMOOTHING,
        "desirable_weight": DESIRABLE,
        "undesirable_weight": UNDESIRABLE,
        "labels": LABELS,
        "mask": mask.tolist(),
        "policy": policy.tolist(),
        "reference": reference.tolist(),
        "strange": strange.tolist(),
        "strange_reference": strange_reference.tolist(),
        "trl_losses": found,
    }
    path = Path(__file__).parents[1] / "tests" / "algorithms" / "fixtures" / "trl_losses.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    print(found)


if __name__ == "__main__":
    main()
