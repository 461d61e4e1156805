"""A task: say a word backwards."""

from posttrain.tasks import PromptTask
from posttrain.types import Prompt


def reverse(*, length: int = 2) -> PromptTask:
    letters = "abcdefgh"
    words = [a + b for a in letters for b in letters][: 10 * length]

    def prompts(split: str, chosen: list[str]) -> tuple[Prompt, ...]:
        return tuple(
            Prompt(id=f"{split}-{word}", text=f"{word}>", columns={"answer": word[::-1]})
            for word in chosen
        )

    return PromptTask(
        name="reverse",
        rewards={"exact": 1.0},
        train=prompts("train", words[4:]),
        test=prompts("test", words[:4]),
        solve=lambda prompt: prompt.columns["answer"],
        accuracy="exact",
    )
