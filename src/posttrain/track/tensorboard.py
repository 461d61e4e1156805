"""TensorBoard event files; the package ``tensorboard`` is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.track.sample_table import Rows, markdown
from posttrain.track.stage import Stage


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tracker 'tensorboard': {error.name} is not installed; "
            "run `pip install 'posttrain[tensorboard]'`, or leave this tracker out"
        ) from error
    return SummaryWriter


class TensorBoardTracker:
    """Writes scalars to ``tensorboard/`` in the stage's folder: ``tensorboard --logdir RUN``.

    Rollouts go there as a table of text, every ``samples_every`` steps; 0: never.
    """

    def __init__(self, stage: Stage, *, samples_every: int = 10) -> None:
        self._every = samples_every
        # A resumed run logs the steps after its checkpoint again: hide those from before.
        purged = stage.steps_before + 1 if stage.steps_before else None
        # The default queue of 10 would block on every step, which logs about 40 numbers.
        folder = str(stage.folder / "tensorboard")
        self._writer: Any = _writer_class()(log_dir=folder, purge_step=purged, max_queue=1000)

    check_ready = staticmethod(_writer_class)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_samples(self, step: int, rows: Rows) -> None:
        """Record rollouts of a step as a table."""
        if self._every and step % self._every == 0:
            self._writer.add_text("rollouts", markdown(rows()), step)

    def close(self) -> None:
        """Write out what is still held back."""
        self._writer.close()
