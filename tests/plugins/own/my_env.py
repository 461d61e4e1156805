"""An environment of two turns: it asks again, and counts what the second answer has in common."""

from dataclasses import dataclass

from posttrain.types import Prompt, Turn


@dataclass
class State:
    answer: str
    first: str | None = None


class AsksAgain:
    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks

    def start(self, prompt: Prompt) -> State:
        return State(answer=prompt.columns["answer"])

    def reply(self, state: State, turn: Turn) -> str | float:
        if state.first is None:
            state.first = turn.text
            return "no="
        if self.breaks and len({*turn.text}) % 2:
            raise RuntimeError("the tool is gone")
        return len({*turn.text} & {*state.first}) / 4
