"""A tracker: a line of text for each step, and a word at the end."""

from collections.abc import Mapping

from posttrain.track import Stage


class Lines:
    def __init__(self, stage: Stage, *, file: str = "lines.txt") -> None:
        self.file = (stage.folder / file).open("w", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.write(f"{step} {metrics['reward/mean']!r}\n")

    def close(self) -> None:
        self.file.write("closed\n")
        self.file.close()
