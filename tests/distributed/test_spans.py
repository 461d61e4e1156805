"""Spans of time, recorded from threads and processes."""

import subprocess
import sys
import threading
import time

import pytest

from posttrain.distributed.spans import Span, Spans


def test_a_block_is_recorded_also_where_it_raises() -> None:
    spans, before = Spans(), time.time()
    with pytest.raises(ValueError, match="broken"), spans.record("driver", "sampling"):
        raise ValueError("broken")
    (span,) = spans.all()
    assert (span.who, span.what) == ("driver", "sampling")
    assert before <= span.start <= span.end <= time.time()


def test_a_clock_that_is_set_back_gives_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, readings = Spans(), iter([100.0, 90.0])
    monkeypatch.setattr("posttrain.distributed.spans.time.time", lambda: next(readings))
    with spans.record("driver", "sync"):
        pass
    assert spans.all() == [Span("driver", "sync", 100.0, 100.0)]


def test_the_oldest_are_forgotten_and_counted() -> None:
    spans = Spans(kept=2)
    for number in range(5):
        spans.add(Span("engine 0", str(number), number, number + 1))
    assert [span.what for span in spans.all()] == ["3", "4"]
    assert spans.forgotten == 3


def test_no_span_of_a_thread_is_lost() -> None:
    spans = Spans()

    def work(who: str) -> None:
        for _ in range(500):
            with spans.record(who, "step"):
                pass

    threads = [threading.Thread(target=work, args=(f"learner {rank}",)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans.all()) == 2000


def test_spans_of_two_processes_line_up() -> None:
    script = "from posttrain.distributed.spans import *; s = Spans()\nwith s.record('', ''): pass"
    script += "\nprint(*s.all()[0][2:])"
    with (outer := Spans()).record("driver", "waiting"):
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    start, end = map(float, said.stdout.split())
    (around,) = outer.all()
    assert around.start <= start <= end <= around.end
