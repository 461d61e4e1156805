from typing import Any

import posttrain


def unique_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in contents]


run = posttrain.rl(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    prompts="trl-lib/ultrafeedback-prompt",
    reward=unique_letters,
    algorithm="rloo",
)
