"""The lecture's sorting experiment, on the same functions that train language models.

A model that cannot sort is rewarded for sorting: every delta, loss, KL setting and reward of the
lecture side by side, over many seeds. ``posttrain walkthrough`` runs it; docs/walkthrough.md reads
the result.
"""

from posttrain.walkthrough.experiment import run
from posttrain.walkthrough.published import run_as_published

__all__ = ["run", "run_as_published"]
