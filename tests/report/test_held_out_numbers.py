"""What the two evaluations of a run say together."""

from typing import Any

from posttrain.report import HeldOut

ONE = {"value": 1.0, "low": 0.7, "high": 1.0}


def evaluation(**changed: Any) -> dict[str, Any]:
    estimates = {"full_marks/ten": ONE, "pass@4/ten": ONE, "full_marks/tidy": ONE}
    return {"estimates": estimates, "parts": {"ten": 1.0}, "reward": 1.0, **changed}


def test_full_marks_that_turn_out_to_be_unknown_are_withdrawn_on_both_sides() -> None:
    """Before, the reward gave 1 at most and seemed to have full marks; after, it gave 10."""
    after = evaluation(estimates={"full_marks/tidy": ONE}, above_one={"ten": 10.0})
    found = HeldOut(weights={"ten": 1.0, "tidy": 1.0}, before=evaluation(), after=after)
    assert list(found.estimates("before")) == ["full_marks/tidy"]
    assert list(found.estimates("after")) == ["full_marks/tidy"]
    share = found.shares()["full_marks/ten"]
    assert (share.before, share.after) == (None, None)
    assert "largest seen 10" in share.note


def test_so_is_an_accuracy_by_such_a_reward() -> None:
    before = evaluation(estimates={"accuracy": ONE, "pass@4": ONE})
    after = evaluation(estimates={}, above_one={"ten": 10.0})
    found = HeldOut(accuracy_by="ten", weights={"ten": 1.0}, before=before, after=after)
    assert found.estimates("before") == {}
    assert found.shares()["accuracy"].before is None
