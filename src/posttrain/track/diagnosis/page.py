"""``docs/diagnosis.md``, made from the rules: ``python -m posttrain.track.diagnosis`` prints it."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.track.diagnosis.findings import CLEARS_AFTER
from posttrain.track.diagnosis.history import WINDOW
from posttrain.track.diagnosis.rules import RULES, Rule

HEAD = f"""\
# Diagnosis

<!-- Written by `python -m posttrain.track.diagnosis > docs/diagnosis.md`: change the code. -->

While a stage goes on, rules read its [metrics](metrics.md) and say in plain language what has
begun to go wrong, and which key to turn. Most read the stage `rl`; some read `sft`, `reward`, or
`eval` with what was held out. A finding is

* a line in the terminal, under the progress display, when it begins;
* a line of `RUN/STAGE/diagnosis.jsonl` with `step`, `finding` (the name below), `text`, `remedy`,
  `change` (overrides to run again with, where there are any) and `until`, which is null. When it is
  over, the line is written again with the step it was over at; where it still holds when the
  stage ends, with what it is then;
* in `summary.json`, under `diagnosis`, and in the summary that the run prints, which goes on with
  what to try next.

Every rule looks at windows of {WINDOW} steps: neither the first steps nor a single noisy one raise
an alarm. Some can be answered only at the end of a stage; and what held in all steps of a stage of
fewer than {WINDOW} is said there. A finding is reported once. It is over when its rule has not held
for {CLEARS_AFTER} steps in a row; if it holds again after that, it is a new finding. A metric that
a run does not have (a KL without a reference, a value without a critic) leaves its rules silent.

`staleness/mean` counts versions as the engine claims them: an engine that never took the new
weights and does not know it shows 0 there. What gives it away is `mismatch/mean`, which compares
its log-probs with the trainer's: see `drift`.

*What decides* is the reward that [checks answers](tasks.md#accuracy); without one, rules about it
are silent. Where an [environment](environments.md) scores, its score decides. What to do depends on
the case; a finding names the one that holds. It is advice, never a stop: the run goes on.
"""


def diagnosis_page(rules: Mapping[str, Rule] = RULES) -> str:
    """The whole page: one row for each rule."""
    lines = [HEAD, "| finding | what is seen | what it means | what to do |", "|---|---|---|---|"]
    for name, rule in rules.items():
        seen = " ".join((rule.check.__doc__ or "").split())
        read = "" if "rl" in rule.stages else f" ({', '.join(rule.stages)})"
        said = [f"*{case}*: {text}" if case else text for case, text in rule.remedies.items()]
        lines.append(f"| `{name}`{read} | {seen} | {rule.means} | {' '.join(said)} |")
    return "\n".join(lines) + "\n"
