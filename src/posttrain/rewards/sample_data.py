"""The data of a rollout that a reward may ask for by name: in our words, and in TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.types import Prompt, Rollout

# What a reward may ask for besides the prompt's columns.
FROM_ROLLOUT: dict[str, Callable[[Rollout], Any]] = {
    "prompt": lambda rollout: _question(rollout.prompt),
    "completion": lambda rollout: rollout.answer,
    "num_tokens": lambda rollout: sum(rollout.mask),
    "stop_reason": lambda rollout: rollout.stop_reason,
}
# The same in TRL's words: messages where the prompt is messages, else text.
FROM_TRL: dict[str, Callable[[Rollout], Any]] = {
    "prompts": lambda rollout: [*map(dict, rollout.prompt.messages)] or rollout.prompt.text,
    "completions": lambda rollout: _answered(rollout),
    "completion_ids": lambda rollout: [
        token for turn in rollout.turns if turn.sampled for token in turn.tokens
    ],
}


def _answered(rollout: Rollout) -> Any:
    said = rollout.answer
    return [{"role": "assistant", "content": said}] if rollout.prompt.messages else said


def _question(prompt: Prompt) -> str:
    """The text of a prompt; of a chat, the last message."""
    return prompt.text or (prompt.messages[-1]["content"] if prompt.messages else "")
