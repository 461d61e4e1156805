"""The recipe that does what a TRL script or configuration does, and what has no counterpart.

Where a script says nothing, the defaults of TRL 1.16 are written out: they are not ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config.describe import tables
from posttrain.config.peers.option_names import ours, without
from posttrain.config.peers.trl_script import TrlJob, Unread, read_asked
from posttrain.config.read import put_key
from posttrain.config.sections import Recipe
from posttrain.config.toml import write_toml

_SHARED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
_SAMPLED = {**_SHARED, "learning_rate": 1e-6, "max_completion_length": 512}
# A trainer: the stage, its first settings, and TRL's defaults.
_STAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GRPO": (
        "rl",
        {"algorithm": "grpo"},
        {**_SAMPLED, "num_generations": 8, "beta": 0.0, "loss_type": "dapo", "epsilon": 0.2},
    ),
    "RLOO": ("rl", {"algorithm": "rloo"}, {**_SAMPLED, "num_generations": 2, "beta": 0.05}),
    "PPO": ("rl", {"algorithm": "ppo"}, {**_SAMPLED, "num_generations": 1, "beta": 0.05}),
    "SFT": ("sft", {}, {**_SHARED, "learning_rate": 2e-5}),
    "Reward": ("reward", {}, {**_SHARED, "learning_rate": 1e-4}),
    "DPO": ("dpo", {"loss": "dpo"}, {**_SHARED, "learning_rate": 1e-6, "beta": 0.1}),
    "KTO": ("dpo", {"loss": "kto"}, {**_SHARED, "learning_rate": 1e-6, "beta": 0.1}),
    "ORPO": ("dpo", {"loss": "orpo"}, {**_SHARED, "learning_rate": 1e-6, "beta": 0.1}),
    "CPO": ("dpo", {"loss": "simpo"}, {**_SHARED, "learning_rate": 1e-6}),
}
_WEIGHTS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean"}
_DIRECT = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
# Options whose counterpart says it in another way: what they are set to means nothing there.
_OTHERWISE = ("delta", "importance_sampling_level", "mask_truncated_completions", "scale_rewards")
_SCHEDULES = ("constant", "linear", "cosine")


def recipe_of_trl(path: str | Path, *, trainer: str | None = None) -> str:
    """The recipe as TOML; what has no counterpart stands in comments above it."""
    asked = read_asked(Path(path), trainer=trainer)
    if asked.trainer not in _STAGES:
        raise ValueError(f"trainer: {asked.trainer!r}; known: {', '.join(_STAGES)}")
    return _Translation(asked).text(Path(path).name)


class _Translation:
    """Settings by dotted key, and notes; every option of TRL ends up in one of them."""

    def __init__(self, asked: TrlJob) -> None:
        self.stage, first, defaults = _STAGES[asked.trainer]
        self._asked, self.notes = asked, list(asked.notes)
        self._known = dict(tables())[self.stage].model_fields
        self._set: dict[tuple[str, ...], Any] = {(self.stage, k): v for k, v in first.items()}
        merged = {**defaults, **asked.options}
        self._options = {name: value for name, value in merged.items() if value is not None}
        self._model_and_data()
        self._batches()
        (self._rl if self.stage == "rl" else self._data_stage)()
        self._common()
        for name in list(self._options):
            self._by_name(name, self._options.pop(name))
        self._adapter()

    def text(self, source: str) -> str:
        """The recipe as TOML."""
        lines = [f"# converted from {source}; run it with: posttrain run FILE.toml"]
        lines += [f"# {note}" for note in self.notes]
        lines = ["".join(c if c.isprintable() else " " for c in line)[:500] for line in lines]
        values: dict[str, Any] = {name: {} for name in Recipe.model_fields}
        for path, value in self._set.items():
            put_key(values, path, value=value)
        return "\n".join([*lines, "", write_toml({k: v for k, v in values.items() if v})])

    def _put(self, key: str, value: Any) -> None:
        self._set[tuple(key.split("."))] = value

    def _take(self, name: str, default: Any = None) -> Any:
        """An option, taken out; one that is not read is told, and is its default.

        Where that is a number, so is the option, and above 0 where the default is.
        """
        value = self._options.pop(name, default)
        number = isinstance(default, int | float)
        if isinstance(value, Unread) or (number and not _is_number(value, above=default > 0)):
            text = value.text if isinstance(value, Unread) else repr(value)
            self.notes.append(f"{name} = {text}: not read; set it by hand")
            return default
        return value

    def _model_and_data(self) -> None:
        asked = self._asked
        for key, value in (("model.name", asked.model), *self._data_keys()):
            if isinstance(value, Unread):
                self.notes.append(f"{key}: {value.text} is not read; set it by hand")
            elif value is not None:
                self._put(key, value)
        if self.stage == "rl":
            weights = self._take("reward_weights") or [1.0] * len(asked.rewards)
            if not isinstance(weights, list) or len(weights) != len(asked.rewards):
                self.notes.append(f"reward_weights = {weights!r}: not one for each; set them")
                weights = [1.0] * len(asked.rewards)
            for reward, weight in zip(asked.rewards, weights, strict=True):
                self._reward(reward, weight)
        for name, key in (("output_dir", "run.folder"), ("seed", "run.seed")):
            if (value := self._take(name)) is not None:
                self._put(key, value)

    def _data_keys(self) -> list[tuple[str, Any]]:
        train, test = self._asked.train, self._asked.test
        if self.stage != "rl":
            return [(f"{self.stage}.data", train), (f"{self.stage}.test_data", test)]
        return [("task.name", "file"), ("task.path", train), ("task.test_path", test)]

    def _reward(self, reward: Any, weight: Any) -> None:
        if not _is_number(weight):
            self.notes.append(f"reward_weights: {weight!r} is not read; set it by hand")
            weight = 1.0
        if isinstance(reward, Unread):
            self.notes.append(f"reward {reward.text}: not read; write it as a function of a module")
        elif ":" in str(reward):
            self._set["rewards", reward] = float(weight)
        elif "/" in str(reward):
            self._set["rewards", "model"] = {"weight": float(weight), "path": reward}
        else:
            self.notes.append(f"reward {reward!r}: not known here; see docs/rewards.md")

    def _batches(self) -> None:
        self._size = self._take("per_device_train_batch_size", 8)
        self._accumulated = self._take("gradient_accumulation_steps", 1)
        if self.stage != "rl":
            self._put(f"{self.stage}.batch_size", self._size * self._accumulated)

    def _rl(self) -> None:
        group = self._take("num_generations", 8)
        rounds = self._take("steps_per_generation", self._accumulated)
        completions = self._take("generation_batch_size", self._size * rounds)
        rounds = max(1, completions // self._size)
        if completions % group:
            self.notes.append(f"{completions} completions do not divide into groups of {group}")
        minibatches = max(1, rounds // self._accumulated)
        epochs = self._take("num_iterations", 1)
        rl: dict[str, Any] = {
            "prompts_per_step": max(1, completions // group),
            "group_size": group,
            "max_new_tokens": self._take("max_completion_length", 512),
        }
        rl |= {"minibatches": minibatches} if minibatches > 1 else {}
        rl |= {"epochs": epochs} if epochs > 1 else {}
        passes, steps = self._take("num_train_epochs", 3), self._take("max_steps", -1)
        if steps > 0:
            rl["steps"] = max(1, steps // (minibatches * epochs))
        else:
            self.notes.append(
                f"rl.steps: TRL trains for {passes} epochs; set it to the number of prompts × "
                f"{passes} ÷ {rl['prompts_per_step']}"
            )
        beta = self._take("beta", 0.0)
        rl |= {"kl.coefficient": beta} if beta else {"kl.placement": "none"}
        rl |= self._loss(rl["max_new_tokens"])
        if self._take("use_vllm", False):
            rl["engine"] = "vllm"
        for key, value in rl.items():
            self._put(f"rl.{key}", value)

    def _loss(self, longest: int) -> dict[str, Any]:
        """How terms are clipped, averaged and scaled; where it is none of ours, that is told."""
        found: dict[str, Any] = {}
        kind, low = self._take("loss_type"), self._take("epsilon")
        high, scaled = self._take("epsilon_high", low), self._take("scale_rewards", "group")
        if self._asked.trainer != "GRPO":
            if kind or low:
                self.notes.append("loss_type and epsilon: here the algorithm's own")
            return found
        found["loss"] = {"clip_low": low, "clip_high": high}
        if kind == "dr_grpo":
            found["weights"] = {"name": "sequence_sum", "length": longest}
        elif str(kind) in _WEIGHTS:
            found["weights"] = _WEIGHTS[str(kind)]
        else:
            self.notes.append(f"loss_type = {kind!r}: see posttrain explain for one like it")
        if scaled in (False, "none"):
            found["advantage"] = "group_centred"
        elif scaled not in (True, "group"):
            self.notes.append(f"scale_rewards = {scaled!r}: see posttrain explain for advantages")
        if self._take("importance_sampling_level", "token") != "token":
            found["loss"] = {"name": "sequence_clipped", **found["loss"]}
        return found

    def _data_stage(self) -> None:
        kind = self._take("loss_type")
        if self._asked.trainer == "CPO" and kind != "simpo":
            self.notes.append("CPO's own loss has no counterpart: dpo.loss is SimPO's, like it")
        elif self.stage == "dpo" and kind is not None:
            kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
            if isinstance(kind, str) and kind in _DIRECT:
                self._put("dpo.loss", _DIRECT[kind])
            else:
                self.notes.append(f"loss_type = {kind!r}: known: {', '.join(_DIRECT)}")
        elif kind not in (None, "nll"):
            self.notes.append(f"loss_type = {kind!r}: no counterpart")
        passes, steps = self._take("num_train_epochs", 3), self._take("max_steps", -1)
        key, value = ("steps", steps) if steps > 0 else ("epochs", max(1, round(passes)))
        self._put(f"{self.stage}.{key}", value)
        if (longest := self._take("max_length")) is not None:
            here = self.stage == "sft"
            if here:
                self._put("sft.max_length", longest)
            over = "that" if here else "the model's context"
            self.notes.append(f"max_length = {longest}: rows over {over} are left out, none is cut")
        if self.stage == "sft":
            self._train_on()

    def _train_on(self) -> None:
        """What is learned: TRL learns whole conversations, unless it is told otherwise."""
        said = self._take("assistant_only_loss")
        if self._take("completion_only_loss") is False:
            self._put("sft.train_on", "all")
        elif said is not True:
            self.notes.append(
                "sft.train_on: TRL trains on all tokens of conversations, and on those of "
                "completions; posttrain trains on the assistant's turns, and on all tokens with "
                'sft.train_on = "all"'
            )
        if (text := self._take("dataset_text_field", "text")) != "text":
            self._put("sft.columns.text", text)

    def _common(self) -> None:
        first, second = self._take("adam_beta1", 0.9), self._take("adam_beta2", 0.999)
        self._put(f"{self.stage}.adam_betas", [first, second])
        schedule = self._take("lr_scheduler_type", "linear")
        if schedule in _SCHEDULES:
            self._put(f"{self.stage}.schedule", schedule)
        else:
            self.notes.append(f"lr_scheduler_type = {schedule!r}: known: {', '.join(_SCHEDULES)}")
        if (ratio := self._take("warmup_ratio")) is not None:
            self.notes.append(f"warmup_ratio = {ratio}: set {self.stage}.warmup_steps")
        reported = self._take("report_to", [])
        names = reported if isinstance(reported, list) else [reported]
        if trackers := [name for name in names if name in ("wandb", "tensorboard")]:
            self._put("run.trackers", trackers)
        if any([self._take("bf16", False), self._take("fp16", False)]):
            self._put("model.compute", "bfloat16")

    def _by_name(self, name: str, value: Any) -> None:
        """An option that is called so here, or that the table of names knows."""
        here = name if name in self._known else ours(name, self._known)
        if isinstance(value, Unread):
            self.notes.append(f"{name} = {value.text}: not read; set it by hand")
        elif name in _OTHERWISE:
            self.notes.append(f"{name} = {value!r}: has no counterpart of the same values")
        elif here and " and " not in here and not isinstance(value, Mapping):
            self._put(f"{self.stage}.{here}", value)
        else:
            there = ours(name, self._known, sections=dict(tables()))
            told = f"set {there} by hand" if there else "no counterpart"
            self.notes.append(without(name) or f"{name} = {value!r}: {told}")

    def _adapter(self) -> None:
        given = dict(self._asked.adapter)
        for theirs, here in {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}.items():
            if theirs in given and not isinstance(given[theirs], Unread):
                self._put(f"adapter.{here}", given.pop(theirs))
        if isinstance(given.get("target_modules"), list):
            self._put("adapter.targets", given.pop("target_modules"))
        for name, value in given.items():
            if isinstance(value, Unread):
                self.notes.append(f"LoraConfig's {name} = {value.text}: not read; set it by hand")
            elif name not in ("task_type", "bias") and value not in (None, 0, "all-linear"):
                self.notes.append(f"LoraConfig's {name} = {value!r}: no counterpart")


def _is_number(value: Any, *, above: bool = False) -> bool:
    """Whether a value is a number, and where it must be, ``above`` 0."""
    number = isinstance(value, int | float) and math.isfinite(value)
    return number and (value > 0 or not above)
