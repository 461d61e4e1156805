"""A model card in Markdown, written from the facts of a run.

Prompts, answers, names and settings are text of others: they are escaped, so that none can open a
table, a heading, a fence or a tag, or end the metadata.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.report.facts import RunFacts, describe_finding
from posttrain.report.held_out import Interval
from posttrain.track.local_paths import without_folders

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$:@])")
_LONGEST = 160  # characters of a text that the card shows
_SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """What a card says beside the results: where the model comes from, and how it was made.

    ``base`` is a hub id, or "" where the base has none; ``began`` says in words what it was.
    """

    repo: str
    recipe: str
    base: str = ""
    began: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    license: str = ""
    adapter: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


def model_card(facts: RunFacts, source: CardSource) -> str:
    """The text of README.md: metadata for the hub, then what a reader wants to know."""
    parts = [
        _metadata(facts, source),
        f"# {escaped(source.repo.rpartition('/')[2])}",
        _made(facts, source),
        "## Use",
        _use(source),
        "## Results",
        _results(facts),
        *_samples(facts),
        "## Data",
        _list({key: escaped(text) for key, text in source.data.items()})
        or "The run names no data of its own.",
        "## Training",
        _training(facts, source),
        "The recipe, with every default filled in; paths of the machine are left out:",
        fenced(source.recipe, "toml"),
        "## Limits",
        _limits(facts),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: object, *, limit: int = _LONGEST) -> str:
    """Text that Markdown and HTML read as these characters, in one line.

    >>> escaped("a|b <script>\\n---")
    'a\\\\|b &lt;script&gt; \\\\-\\\\-\\\\-'
    """
    line = " ".join(str(text).split())
    line = "".join(letter if letter.isprintable() else "�" for letter in line)
    line = line if len(line) <= limit else line[: limit - 1] + "…"
    return html.escape(_MARKUP.sub(r"\\\1", line), quote=False)


def fenced(text: str, language: str = "") -> str:
    """A block of code; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _metadata(facts: RunFacts, source: CardSource) -> str:
    # JSON is YAML: a text in its quotes can neither end the line nor the block.
    stages = [stage for stage in ("sft", "dpo", "rl") if stage in facts.run.stages]
    fields: dict[str, Any] = {
        "base_model": source.base,
        "base_model_relation": ("adapter" if source.adapter else "finetune") if source.base else "",
        "library_name": "peft" if source.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "license": source.license,
        "datasets": list(source.datasets),
        "tags": ["posttrain", *stages, *(["lora"] if source.adapter else [])],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value]
    return "\n".join(["---", *lines, "---"])


def _made(facts: RunFacts, source: CardSource) -> str:
    what = "A LoRA adapter of" if source.adapter else "Trained from"
    stages = ", ".join(facts.run.stages)
    return f"{what} {escaped(source.base or source.began)} with posttrain: {stages}."


def _use(source: CardSource) -> str:
    if not source.adapter:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(source.repo)})",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(source.repo)})",
        ]
    else:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(source.repo)})",
            f"base = AutoModelForCausalLM.from_pretrained({json.dumps(source.base)})",
            f"model = PeftModel.from_pretrained(base, {json.dumps(source.repo)})",
        ]
    return fenced("\n".join(lines), "python")


def _results(facts: RunFacts) -> str:
    rows: list[tuple[str, str, str]] = []
    for share in facts.held_out.shares().values():
        found = (_interval(share.before), _interval(share.after))
        rows.append((share.label, *(found if not share.note else (share.note, ""))))
    for label, change in {**facts.measures, **facts.losses}.items():
        before, after = ("" if value is None else f"{value:.3f}" for value in change)
        rows.append((label, before, after))
    rows += [(label, "", text) for label, text in facts.produced_texts.items()]
    if not rows:
        return "The run was not evaluated."
    lines = ["| | before | after |", "|---|---|---|"]
    lines += ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in rows]
    problems = facts.summary.get("problems")
    lines.append("")
    over = f" of {problems} held-out problems" if problems else ""
    lines.append(f"Intervals are 95%; shares are{over or ' of held-out rows'}; one run, one seed.")
    if broken := facts.held_out.broken():
        lines.append(f"Scores that broke: {escaped(without_folders(broken))}.")
    return "\n".join(lines)


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _samples(facts: RunFacts) -> list[str]:
    if not facts.samples:
        return []
    shown = facts.samples[:_SAMPLES]
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for row in shown:
        cells = (escaped(row.get(name, "")) for name in ("prompt", "before", "after"))
        lines.append("| " + " | ".join(cells) + " |")
    drawn = facts.summary.get("answers_shown", "")
    return ["### Answers", f"{len(shown)} of these: {escaped(drawn)}.", "\n".join(lines)]


def _training(facts: RunFacts, source: CardSource) -> str:
    summary, seconds = facts.summary, facts.seconds
    found = {
        "seed": summary.get("seed"),
        "hardware": summary.get("hardware"),
        "time": None if seconds is None else f"{seconds / 3600:.2f} hours",
        "versions": ", ".join(f"{name} {text}" for name, text in source.versions.items()),
        **{f"{stage}, how": without_folders(way) for stage, way in facts.ways.items()},
    }
    return _list({key: escaped(value) for key, value in found.items() if value not in (None, "")})


def _limits(facts: RunFacts) -> str:
    known = "Nobody has checked this model for safety, bias or facts beyond the numbers above."
    short = f", but {facts.unjudged}" * bool(facts.unjudged)
    if not facts.findings:
        return f"{known} While it trained, no problem was found{short}."
    lines = [known, "", f"Problems found during training{short}:", ""]
    for finding in facts.findings:
        when, text = describe_finding(finding)
        told = f"{finding.get('stage', '')} {finding.get('finding', '')}".strip()
        said = escaped(without_folders(f"{told}, {when}: {text}"), limit=500)
        lines.append("* " + re.sub(r"\\`(.*?)\\`", r"<code>\1</code>", said))
    return "\n".join(lines)


def _list(items: Mapping[str, str]) -> str:
    return "\n".join(f"* {escaped(key)}: {text}" for key, text in items.items())
