"""``docs/diagnosis.md``, made from the rules."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.track.diagnosis.findings import CLEARS_AFTER
from posttrain.track.diagnosis.history import WINDOW
from posttrain.track.diagnosis.rules import RULES, Rule

HEAD = f"""\
# Diagnosis

<!-- Written by `make pages`: change the code, not this. -->

While a run trains, rules read its [metrics](metrics.md) and say in plain words what goes wrong and
which key to change. It is advice: the run goes on. `posttrain run` prints each finding when it
begins; the page of `posttrain view` shows them over time. `summary.json` keeps them under
`diagnosis`, and `RUN/STAGE/diagnosis.jsonl` has one line each: `step`, `finding` (a name below),
`text`, `remedy`, `change` (overrides to run again with, if any) and `until`, which is null while
it holds. When it is over or the stage ends, the line is written again.

* Rules look at windows of {WINDOW} steps, so a single noisy step raises no alarm. Some wait for
  the end of the stage; what held in all steps of a stage of fewer than {WINDOW} is reported there.
* A finding is reported once. It is over when its rule has not held for {CLEARS_AFTER} steps in a
  row; if the rule holds again later, that is a new finding. Without its metric a rule is silent.
* *What decides* is the reward that [checks answers](tasks.md#accuracy), or an
  [environment](environments.md)'s score. Without either, rules about it are silent.
* `staleness/mean` counts the versions that the engine claims: an engine that never took the new
  weights shows 0 there. `mismatch/mean` gives it away: see [`drift`](#drift).
* Rules read the stage `rl`, unless another is named. A run names only the remedy of its case.
"""


def diagnosis_page(rules: Mapping[str, Rule] = RULES) -> str:
    """The whole page: a table of the rules, and a section for each."""
    table, sections = ["| finding | what it means |", "|---|---|"], []
    for name, rule in rules.items():
        seen = " ".join((rule.check.__doc__ or "").split())
        seen = seen[:1].lower() + seen[1:]
        read = "" if "rl" in rule.stages else f" ({', '.join(rule.stages)})"
        table.append(f"| [`{name}`](#{name}){read} | {rule.means} |")
        said = [f"* {case and f'*{case}*: '}{text}" for case, text in rule.remedies.items()]
        sections += ["", f"## {name}", "", f"{rule.means} Found when {seen}", "", *said]
    return "\n".join([HEAD, *table, *sections]) + "\n"
