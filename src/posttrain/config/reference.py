"""The documentation of recipes, made from the models: docs/configuration.md."""

from __future__ import annotations

from typing import NamedTuple

from pydantic.fields import FieldInfo

from posttrain.config.describe import expected, keys, tables
from posttrain.config.no_effect import NO_EFFECT, NO_EFFECT_OF_PIECES
from posttrain.config.preference_rules import PREFERENCE_RULES
from posttrain.config.recipe_rules import RECIPE_CAUTIONS, RECIPE_RULES, SFT_RULES, TEACHER_RULES
from posttrain.config.rl_rules import ENGINE_RULES, PIECE_RULES, RL_CAUTIONS, RL_RULES
from posttrain.config.sections import Recipe
from posttrain.config.toml import value_text
from posttrain.config.usual import USUAL

HEAD = """\
# Configuration

<!-- Written by `make pages`: change the code, not this. -->

A recipe is a TOML file. Every key has a default; what you leave out is filled in from the row of
the algorithm (`posttrain explain grpo` prints it) and from the tables below.

```toml
[task]
name = "arithmetic"

[rl]
algorithm = "grpo"
steps = 200
learning_rate = 1e-3
kl = { coefficient = 0.01 }
loss = { name = "clipped", clip_high = 0.28 }

[eval]
problems = 500
```

* `posttrain run RECIPE.toml --rl.steps 6 --rl.kl.coefficient 0.1 --task.digits 2` puts values over
  the file. A value is read as TOML, and as text where it is none: `--rl.schedule cosine`,
  `--run.stages sft,rl`, `--rl.dynamic_sampling true`, `--rl.top_p=0.95`. A text in quotes is one
  item of a list, `--rl.stop '"\\n\\nQuestion:"'`; several are `--rl.stop '["\\n", "Question:"]'`.
  Without quotes `--rl.stop` takes the text as it stands, `\\n` and `\\t` read.
* `posttrain run RECIPE.toml --dry-run` prints the resolved recipe with its batch arithmetic, and
  runs nothing. What it prints is itself a recipe.
* A *piece* (advantage, loss, weights, correction, engine, task) is a name, or a table with a name
  and options: `loss = { name = "clipped", clip_high = 0.28 }`. A name replaces the algorithm's own
  piece, with the defaults of the function. A table without a name changes options of the
  algorithm's own: `--rl.loss.clip_high 0.28`. `"package.module:function"` is a function of yours.
* Its module, and every relative path in a recipe (data, models), are looked for in the current
  folder first, then in the folder of the recipe; where both have one and they differ, the run says
  which it takes. The run folder, and a path on the command line, are seen from the current folder.
* From Python, `posttrain.config.recipe_from_dict` takes the same sections as a dict, with the same
  checks.

Nothing is silent. A key that does not exist, a value of the wrong type or out of range, an option
without effect and an impossible combination are errors before anything is loaded, reported
together.
"""

TASK = """\
The name of a task, and beside it the task's own options:

```toml
[task]
name = "arithmetic"     # or "my_module:my_task"
digits = 2
```

An option that the task does not have is an error that lists those it has. `accuracy` is for every
task: the reward by which held-out answers are right, by name or as a table of a name and options,
or `"none"`. Without it, see [accuracy](tasks.md#accuracy). `env` too: the
[environment](environments.md) that replies to the policy's turns, by name or as such a table.
"""

REWARDS = """\
Rewards by name: a weight, or a table with a weight (1 unless given) and options. Their weighted sum
is what is learned; one of weight 0 is only monitored. The order means nothing. Without this
section, the task's own rewards count. `maximum` says what a reward gives at most, if not 1.

```toml
[rewards]
numeric = 1.0
format = { weight = 0.2 }
"my_module:my_reward" = 0.5     # a name with a ":" is written in quotes
```

`model` is a reward model: the one that the stage `reward` of the same run made, or any folder that
`AutoModelForSequenceClassification` loads with one label:

```toml
[rewards]
model = { weight = 1.0, path = "reward" }      # or path = "FOLDER"
```
"""

SWEEP = """\
Several adapters at once, each with changes of its own: see [adapters](adapters.md#several-at-once).
A row takes keys of `[rl]` and `[rewards]`, `run.seed` and `adapter.alpha`; `rl.adapters` seeds of
each row are trained.

```toml
[[sweep]]
rl.learning_rate = 1e-4

[[sweep]]
rl.learning_rate = 3e-4
rl.kl.coefficient = 0.01
```
"""

KL_RULE = """\
* rl.kl: a placement needs a coefficient above 0, and a rule that steers a target.
  `--rl.kl.coefficient 0` is short for the placement "none".
* rl.critic: an advantage that asks for values has a critic without being told: gae, which ppo and
  ppo_penalty have, and one of your own that declares `@piece(needs={"values"})`."""
IDLE_RULE = """\
* A key that is given and has no effect. One of the file that only the command line leaves without
  effect (`rl.evaluate_problems` with `--rl.evaluate_every 0`) is left out, and the run says so:"""


# Of the sections whose keys are not known.
WRITTEN = {
    "task": f"## [task]\n\n{TASK}",
    "rewards": f"## [rewards]\n\n{REWARDS}",
    "sweep": f"## [[sweep]]\n\n{SWEEP}",
}


class FieldHelp(NamedTuple):
    """A row of the help: ``section`` is the dotted name of the table that holds ``key``."""

    section: str
    key: str
    takes: str
    default: str
    description: str


def field_help(section: str | None = None) -> list[FieldHelp]:
    """Every key with known type, or those of one section (with the tables inside it).

    >>> field_help("eval")[0]
    FieldHelp(section='eval', key='problems', takes='a whole number of at least 1', default='200',
    description='Test problems, at most.')
    """
    rows = [
        FieldHelp(name, key, expected(field), _default(field), field.description or "")
        for name, table in tables()
        for key, field in keys(table).items()
        if name
    ]
    return [row for row in rows if section in (None, row.section, row.section.split(".")[0])]


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        return str(extra["default"])
    return value_text(field.get_default(call_default_factory=True))


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    parts = [HEAD]
    for field in Recipe.model_fields:
        parts += [WRITTEN[field]] if field in WRITTEN else []
        for name, table in tables():
            if name.partition(".")[0] == field:
                parts.append(f"## [{name}]\n\n{(table.__doc__ or '').strip()}\n\n{_table(name)}")
    parts.append(f"## Rules\n\nRefused, with the fix in the message:\n\n{_rules()}")
    return "\n".join(parts)


def _table(name: str) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    for row in field_help(name):
        if row.section == name:
            cells = (f"`{row.key}`", row.takes, row.default, row.description)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _rules() -> str:
    of_rl = [*RL_RULES, *PIECE_RULES, *TEACHER_RULES, *ENGINE_RULES]
    refused = [*RECIPE_RULES, *SFT_RULES, *PREFERENCE_RULES, *of_rl]
    cautions = [*RECIPE_CAUTIONS, *RL_CAUTIONS]
    lines = [f"* {(rule.__doc__ or '').strip()}" for rule in refused] + [KL_RULE, IDLE_RULE]
    lines += [f"    * {only}" for only in (*NO_EFFECT, *NO_EFFECT_OF_PIECES)]
    lines += ["", "Said, but not refused:", ""]
    lines += [f"* {(rule.__doc__ or '').strip()}" for rule in cautions]
    lines += ["* A value that is not usual (`clip_low` and the next three are options of pieces):"]
    lines += ["", "| key | usual | beyond |", "|---|---|---|"]
    lines += [f"| `{key}` | {usual} | {usual.why} |" for key, usual in USUAL.items()]
    return "\n".join(lines) + "\n"
