"""``docs/diagnosis.md``, made from the rules: ``python -m posttrain.track.diagnosis`` prints it."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.track.diagnosis.findings import CLEARS_AFTER
from posttrain.track.diagnosis.history import WINDOW
from posttrain.track.diagnosis.rules import RULES, Rule

HEAD = f"""\
# Diagnosis

<!-- Written by `python -m posttrain.track.diagnosis > docs/diagnosis.md`: change the code. -->

While the stage `rl` goes on, rules read its [metrics](metrics.md) and say in plain language what
has begun to go wrong, and which key to turn. A finding is

* a line in the terminal, under the progress display, when it begins;
* a line of `RUN/rl/diagnosis.jsonl` with `step`, `finding` (the name below), `text`, `remedy` and
  `until`, which is null. When it is over, the line is written again with the step it was over at;
* in `summary.json`, under `diagnosis`, and in the summary that the run prints.

Every rule looks at windows of {WINDOW} steps: neither the first steps nor a single noisy one raise
an alarm. A finding is reported once. It is over when its rule has not held for {CLEARS_AFTER} steps
in a row; if it holds again after that, it is a new finding. A metric that a run does not have (a KL
without a reference, a value without a critic) leaves its rules silent.

*What decides* is the reward that [checks answers](tasks.md#accuracy); without one, rules about it
are silent. A finding is advice, never a stop: the run goes on.
"""


def diagnosis_page(rules: Mapping[str, Rule] = RULES) -> str:
    """The whole page: one row for each rule."""
    lines = [HEAD, "| finding | what is seen | what it means | what to do |", "|---|---|---|---|"]
    for name, rule in rules.items():
        seen = " ".join((rule.check.__doc__ or "").split())
        lines.append(f"| `{name}` | {seen} | {rule.means} | {rule.remedy} |")
    return "\n".join(lines) + "\n"
