"""A reward model: a language model with one number in place of the vocabulary.

It is an ordinary ``AutoModelForSequenceClassification`` with one label, so any such model can be
used here, and one trained here anywhere else. The score is read at the last real token.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain.models.adapters import AdapterSettings, copy_of_trained, load_adapters
from posttrain.models.files.adapter_folder import holds_adapter, read_adapter, write_adapter
from posttrain.models.files.damaged import check_finite, check_fit, explained
from posttrain.models.files.hub import why_unreachable
from posttrain.models.files.model_folder import check_folder, replacing_folder
from posttrain.models.files.size import check_parts, check_size
from posttrain.models.load import Policy, cast, find_dtype, load_policy, switch_off_dropout
from posttrain.models.quiet import loading_alone, without_bars, without_reports
from posttrain.models.sampling import at_least_float32
from posttrain.protocols import Outputs
from posttrain.types import Batch

_NOTES = "posttrain"  # the key of config.json under which the rest of a RewardModel is kept
_NO_HEAD = "is a language model without a score head; train one with the reward stage"
PAD = "<|reward_pad|>"


@dataclass(frozen=True)
class RewardModel:
    """A model with one label, its tokenizer, and what its raw score must be set against.

    ``mean`` and ``deviation`` are those of its scores on a reference set: ``(raw − mean) /
    deviation`` has mean 0 and deviation 1 there. ``chat`` says whether it was trained on chats
    (None: unknown), ``knows_cut`` whether also on completions that were cut off. ``adapter`` and
    ``base`` are as of a policy. ``pad_token`` is never the last token of a sequence: transformers
    finds the last real token by looking for it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    pad_token: int
    mean: float = 0.0
    deviation: float = 1.0
    chat: bool | None = None
    knows_cut: bool = False
    adapter: AdapterSettings | None = None
    base: str = ""

    @property
    def head(self) -> nn.Linear:
        """The layer that gives the score."""
        head = getattr(self.model, "score", None)
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"reward model: {self.source!r} is a {type(self.model).__name__}, whose score is "
                "not one linear layer on the last token; it can be asked for scores, but not "
                "trained here, and no critic can start from it"
            )
        return head


@loading_alone()
def reward_from_policy(policy: Policy, *, seed: int) -> RewardModel:
    """A reward model on a copy of the policy's weights, with a new head that ``seed`` decides.

    With adapters, the copy is of these alone: the base is the policy's own.
    """
    config = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    tokenizer = _with_free_pad(policy)
    # Not yet: the embedding may still have to grow for it, and would drop its gradient.
    config.get_text_config().pad_token_id = config.pad_token_id = None
    weight = next(policy.model.parameters())
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to move
        torch.manual_seed(seed)
        try:
            model = AutoModelForSequenceClassification.from_config(config)
        except ValueError as error:
            name = type(policy.model).__name__
            raise ValueError(
                f"reward: transformers has no sequence classifier for {name}; choose a backbone "
                "that has one (Llama, Qwen, Gemma, Mistral, GPT-2 … do)"
            ) from error
        cast(model, weight.dtype)
        if policy.adapter is None:
            model.base_model.load_state_dict(policy.model.base_model.state_dict())
        else:
            trunk = copy_of_trained(policy.model.base_model)
            setattr(model, model.base_model_prefix, trunk)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id
        made = RewardModel(
            model=model.eval(),
            tokenizer=tokenizer,
            source=policy.source,
            pad_token=tokenizer.pad_token_id,
            adapter=policy.adapter,
            base=policy.base,
        )
        # Scores start near 0: a large random head would first have to be unlearned.
        nn.init.normal_(made.head.weight, std=1 / (made.head.in_features + 1) ** 0.5)
    model.to(weight.device)
    return made


@loading_alone()
def load_reward(source: str, *, dtype: str = "float32", device: str = "cpu") -> RewardModel:
    """The reward model in a folder (or of a hub name): any sequence classifier with one label."""
    path = Path(source).expanduser()
    if path.is_dir() and holds_adapter(path):
        return _load_adapted(path, dtype=dtype, device=device)
    if path.is_dir():
        check_folder(path, kind="reward model")
        source = str(path)
    unreachable = "" if path.is_dir() else why_unreachable()
    given: dict[str, Any] = {
        "trust_remote_code": False,
        "local_files_only": path.is_dir() or bool(unreachable),
    }
    try:
        config = AutoConfig.from_pretrained(source, **given)
        tokenizer = AutoTokenizer.from_pretrained(source, **given)
    except (OSError, ValueError) as error:
        why = f"The hub cannot be asked ({unreachable})" if unreachable else str(error)
        raise ValueError(
            f"reward model: there is none at {source!r} (rewards.model.path or rl.critic.source); "
            "give the folder of a sequence classifier with one label, as the reward stage writes "
            f"it. {why.splitlines()[0]}"
        ) from error
    if any(name.endswith("ForCausalLM") for name in config.architectures or ()):
        raise ValueError(f"reward model: {source!r} {_NO_HEAD}")
    if config.num_labels != 1:
        raise ValueError(
            f"reward model: {source!r} has {config.num_labels} labels; a reward is one number, so "
            "use a model trained with num_labels = 1"
        )
    check_parts(config.to_dict(), where=f"{source}/config.json")
    check_size(config, where=f"{source}/config.json", dtype=find_dtype(dtype))
    switch_off_dropout(config)
    local = path.is_dir()
    with without_bars(), without_reports(), explained(source, kind="reward model", local=local):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            source,
            config=config,
            dtype=find_dtype(dtype),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **given,
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"reward model: {source!r} lacks the weights {missing}: it {_NO_HEAD}")
    check_fit(report, source=source, kind="reward model", leave="lm_head")
    check_finite(model, source=source, kind="reward model")
    return _with_notes(model.to(device).eval(), tokenizer, source=source)


def _load_adapted(folder: Path, *, dtype: str, device: str) -> RewardModel:
    """The base of a reward model's adapter with a head on it, and both as they were learned."""
    found = read_adapter(folder, whole=("score",))
    if "score.weight" not in found.weights:
        raise ValueError(f"reward model: {str(folder)!r} {_NO_HEAD}")
    policy = load_policy(found.base, dtype=dtype, device=device)
    model = reward_from_policy(policy, seed=0).model
    load_adapters(model, found.settings, weights=found.weights, source=str(folder))
    check_finite(model, source=str(folder), kind="reward model")
    given: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **given)
    notes = getattr(AutoConfig.from_pretrained(str(folder), **given), _NOTES, None)
    setattr(model.config, _NOTES, notes)
    read = _with_notes(model.eval(), tokenizer, source=str(folder))
    return replace(read, adapter=found.settings, base=found.base)


def save_reward(
    reward: RewardModel, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write model, tokenizer and normalisation: a folder that exists is complete.

    ``weights`` stands in for the model's own, where they are spread over several processes.
    """
    notes = {
        "score_mean": reward.mean,
        "score_deviation": reward.deviation,
        "chat": reward.chat,
        "knows_cut": reward.knows_cut,
        "tokenizer": _digest(reward.tokenizer),
    }
    setattr(reward.model.config, _NOTES, notes)
    with replacing_folder(folder) as new:
        if reward.adapter is not None:
            write_adapter(
                reward.model,
                new,
                settings=reward.adapter,
                base=reward.base,
                head="score",
                given=weights,
            )
            reward.model.config.save_pretrained(new)
            reward.tokenizer.save_pretrained(new)
            return
        with without_bars():
            given = None if weights is None else dict(weights)
            reward.model.save_pretrained(new, state_dict=given)
        reward.tokenizer.save_pretrained(new)


def scores(model: nn.Module, batch: Batch) -> Outputs:
    """The forward pass of a reward model, for a learner."""
    return Outputs(scores=score_sequences(model, batch))


def score_sequences(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The raw score of every sequence, with gradient, in float32 at least. Shapes: [B, T] → [B].

    Where the head is one linear layer it reads the last real token itself, whatever its id; any
    other model is asked by its own forward pass.
    """
    real = batch.attention if batch.attention is not None else torch.ones_like(batch.mask)
    inputs = {"input_ids": batch.tokens, "attention_mask": real.long()}
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = _second_text(batch.tokens, real.long())
        return at_least_float32(model(**inputs).logits[:, 0])
    states = model.base_model(**inputs, use_cache=False).last_hidden_state
    rows = torch.arange(len(states), device=states.device)
    last = at_least_float32(states[rows, real.sum(dim=1) - 1])
    with torch.autocast(last.device.type, enabled=False):
        return nn.functional.linear(last, head.weight.to(last.dtype), _bias(head, last))[:, 0]


def with_normalisation(reward: RewardModel, scores: Tensor) -> RewardModel:
    """The model whose normalised score has mean 0 and deviation 1 over these raw scores [N]."""
    deviation = float(scores.double().std(correction=0))
    if len(scores) < 2 or not deviation > 0:
        raise ValueError(
            f"reward: the {len(scores)} reference scores are all the same, so they cannot be "
            "normalised; the reward model has learned nothing, or the data holds one completion"
        )
    return replace(reward, mean=float(scores.double().mean()), deviation=deviation)


def _second_text(tokens: Tensor, real: Tensor) -> Tensor:
    """1 on the second of two texts, as an encoder of pairs wants it: behind the first separator.

    The separator is the last real token of every row.
    """
    last = real.sum(dim=1, keepdim=True) - 1
    separators = (tokens == tokens.gather(1, last)).long() * real
    return (separators.cumsum(1) - separators).clamp_max(1) * real


def _bias(head: nn.Linear, like: Tensor) -> Tensor | None:
    return None if head.bias is None else head.bias.to(like.dtype)


def _with_free_pad(policy: Policy) -> PreTrainedTokenizerBase:
    """The tokenizer, padding with a token that ends no sequence.

    transformers takes the last token that is not padding for the last real one: with the end token
    for padding it would read the score one token too early.
    """
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.padding_side = "right"  # on the left it would move every absolute position
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in policy.end_tokens:
        used = {*policy.end_tokens, tokenizer.bos_token_id}  # others may mask it wherever it is
        unknown = tokenizer.unk_token_id
        free = unknown is not None and unknown not in used
        tokenizer.add_special_tokens({"pad_token": tokenizer.unk_token if free else PAD})
    return tokenizer


def _with_notes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, source: str
) -> RewardModel:
    """Check that tokenizer and model belong together, and read back what was kept."""
    notes: dict[str, Any] = getattr(model.config, _NOTES, None) or {}
    size = model.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values())
    if largest >= size or notes.get("tokenizer", _digest(tokenizer)) != _digest(tokenizer):
        raise ValueError(
            f"reward model: the tokenizer in {source!r} is not the one it was trained with (ids up "
            f"to {largest}, and the model knows {size}); copy its own tokenizer files back"
        )
    model.get_input_embeddings().padding_idx = None  # it would drop that token's gradient
    pad = model.config.get_text_config().pad_token_id
    return RewardModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        pad_token=pad if pad is not None else (tokenizer.pad_token_id or 0),
        mean=float(notes.get("score_mean", 0.0)),
        deviation=float(notes.get("score_deviation", 1.0)),
        chat=notes.get("chat"),
        knows_cut=bool(notes.get("knows_cut")),
    )


def check_same_tokens(reward: RewardModel, policy: Policy, *, kind: str) -> None:
    """Raise where a reward model does not know every token of the policy by the same id."""
    theirs, ours = reward.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    wrong = [token for token, index in ours.items() if theirs.get(token) != index]
    if wrong:
        raise ValueError(
            f"{kind}: {reward.source!r} has another vocabulary than the policy "
            f"({len(theirs)} tokens and {len(ours)}; {wrong[0]!r} is "
            f"{theirs.get(wrong[0], 'missing')} there and {ours[wrong[0]]} here); "
            "use a model made from the policy's family, or start the critic from the policy"
        )


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
