"""A store to measure with has the columns of a run's, whatever columns are added."""

from pathlib import Path

import pytest

from posttrain.runs import Filter, Rollouts

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from store import make_store


def test_a_made_store_is_read_as_a_run_is(tmp_path: Path) -> None:
    make_store(tmp_path / "rollouts", steps=2, rows=32)
    store = Rollouts(tmp_path / "rollouts")
    assert (len(store), store.problems) == (64, {})
    row = store.page(Filter(first_step=2), limit=1).rows[0]
    assert (row["step"], row["turns"], row["token_versions"]) == (2, None, None)
