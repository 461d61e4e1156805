"""One episode of the environment as it is learned from: every token, who wrote it, and the mask."""

from __future__ import annotations

from posttrain.check.bench import Bench
from posttrain.check.verdicts import TokenRow, Verdict
from posttrain.data.collate import collate
from posttrain.data.template import Template
from posttrain.track.printable import counted, printable


def show_episode(bench: Bench) -> Verdict | None:
    """The first rollout in which the environment spoke, else the first, token by token."""
    if bench.setup.env is None:
        return None
    rollout = max(bench.rollouts, key=lambda each: len(each.turns) > 1)
    batch = collate([rollout], pad_token=bench.policy.pad_token)
    turns = {True: "policy", False: "environment"}
    writers = ["prompt"] * len(rollout.prompt.tokens)
    writers += [turns[turn.sampled] for turn in rollout.turns for _ in turn.tokens]
    columns = zip(batch.tokens[0].tolist(), writers, batch.mask[0].tolist(), strict=True)
    bench.episode = [
        TokenRow(token, _text(token, bench.template), writer, trained)
        for token, writer, trained in columns
    ]
    trained = sum(row.trained for row in bench.episode)
    text = (
        f"{counted(len(rollout.turns), 'turn')}, {trained} of {len(rollout.tokens)} tokens behind "
        "the prompt are trained on, those of the policy; token by token below"
    )
    right = all(row.trained == (row.writer == "policy") for row in bench.episode)
    fix = "report this as a fault of posttrain: tokens of the policy alone may be trained on"
    return Verdict("pass" if right else "fail", text, fix)


def _text(token: int, template: Template) -> str:
    """What a token spells; of one that is a part of a character, its name in the vocabulary."""
    text = template.tokenizer.decode([token], clean_up_tokenization_spaces=False)
    name = template.tokenizer.convert_ids_to_tokens(token)
    return printable(name if "\ufffd" in text or not text else text)
