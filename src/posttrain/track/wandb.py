"""Weights & Biases; the package ``wandb`` is optional. Without an account: ``mode="offline"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from posttrain.track.sample_table import Rows, columns_of
from posttrain.track.stage import Stage


def _load() -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tracker 'wandb': {error.name} is not installed; "
            "run `pip install 'posttrain[wandb]'`, or leave this tracker out"
        ) from error
    return wandb


class WandbTracker:
    """One Weights & Biases run for each stage, those of one posttrain run in one group.

    Rollouts go there as a table, every ``samples_every`` steps; 0: never.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        project: str = "posttrain",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
        samples_every: int = 10,
    ) -> None:
        self._every = samples_every
        group = stage.folder.resolve().parent.name
        # The library writes to /tmp where the folder does not exist.
        stage.folder.mkdir(parents=True, exist_ok=True)
        # A resumed run continues under the id that the stage had.
        note = stage.folder / "wandb_run.txt"
        known = (note.read_text(encoding="utf-8").strip() if note.exists() else "") or None
        self._run: Any = _load().init(
            id=known,
            resume="allow" if known else None,
            project=project,
            entity=entity,
            mode=mode,
            name=f"{group}/{stage.name}",
            group=group,
            job_type=stage.name,
            dir=str(stage.folder),
            config=dict(stage.config),
        )
        note.write_text(str(getattr(self._run, "id", "") or ""), encoding="utf-8")

    check_ready = staticmethod(_load)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Rows) -> None:
        """Record rollouts of a step as a table."""
        if self._every and step % self._every == 0:
            found = rows()
            names = columns_of(found)
            data = [[row.get(name) for name in names] for row in found]
            table = _load().Table(columns=names, data=data)
            self._run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        """Send what is still held back and end the run."""
        self._run.finish()
