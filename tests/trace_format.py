"""Whether a trace is as the Trace Event Format wants it."""

import itertools
from typing import Any


def check_format(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The complete events by the name of their row, once everything is as the format wants it."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[int, int], str] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in names
                names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert min(event["ts"], event["dur"]) >= 0
            rows.setdefault(names[event["pid"], event["tid"]], []).append(event)
    for events in rows.values():
        for first, second in itertools.combinations(events, 2):
            assert apart(first, second) or inside(first, second) or inside(second, first)
    return rows


def apart(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["ts"] + first["dur"] <= second["ts"] or second["ts"] + second["dur"] <= first["ts"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
