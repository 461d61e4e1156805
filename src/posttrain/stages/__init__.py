"""The stages of a run, one file each: what each does with the setup that all of them are handed."""

from __future__ import annotations

from posttrain.stages.dpo import run_dpo
from posttrain.stages.eval import run_eval
from posttrain.stages.job import Work
from posttrain.stages.prefer import run_prefer
from posttrain.stages.reward import run_reward
from posttrain.stages.rl import run_rl
from posttrain.stages.sft import run_sft

STAGES: dict[str, Work] = {
    "sft": run_sft,
    "prefer": run_prefer,
    "reward": run_reward,
    "dpo": run_dpo,
    "rl": run_rl,
    "eval": run_eval,
}
