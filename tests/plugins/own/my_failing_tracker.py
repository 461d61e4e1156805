"""Trackers whose server goes away: after the first step, and after the first stage."""

from collections.abc import Mapping

from posttrain.track import Stage


class Server:
    def __init__(self, stage: Stage) -> None:
        self.file = stage.folder / "told.txt"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.file.open("a") as file:
            file.write(f"{step}\n")
        if step > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


class OneStage:
    """One that can be made once: then its server has gone."""

    made = 0

    def __init__(self, stage: Stage) -> None:
        OneStage.made += 1
        if OneStage.made > 1:
            raise ConnectionError("no server")

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
