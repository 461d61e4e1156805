"""``posttrain plan`` for one machine: what fits, part by part, as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from posttrain.config import cautions, read_recipe, recipe_from_dict, resolve
from posttrain.config.read import put_key
from posttrain.config.toml import as_overrides, write_toml
from posttrain.track.printable import command_line, counted
from posttrain.track.progress import loading, phase, showing
from posttrain.track.safe_terminal import Terminal, say, say_json

if TYPE_CHECKING:
    from posttrain.config import Resolved
    from posttrain.estimate.gpus import Device
    from posttrain.estimate.options import Option, Search
    from posttrain.estimate.parts import Footprint
    from posttrain.estimate.work import Work

PHASES = {
    "sampling": "while completions are sampled",
    "asking": "while reference, critic or teacher score",
    "learning": "in forward and backward",
}


def plan_memory(
    source: str,
    overrides: Sequence[str],
    *,
    gpu: str | None,
    prompt_tokens: int,
    shape: str | None,
    as_json: bool,
) -> None:
    """Predict what a recipe, or GRPO on a model, takes on one device, and print it."""
    recipe_of(source, overrides)  # what is wrong with it is said before anything heavy is loaded
    with loading():
        from posttrain.estimate.gpus import find_device, step_seconds
        from posttrain.estimate.options import Search
        from posttrain.estimate.work import work_of
    device = find_device(gpu)
    sizes = None if shape is None else parse_shape(shape)
    search = Search(
        read=lambda more: recipe_of(source, [*overrides, *more]),
        ask=partial(work_of, device=device.kind, prompt_tokens=prompt_tokens, shape=sizes),
        memory=device.memory,
    )
    with showing(), phase("counting"):
        found, work = search.found, search.work
        options = search.helpful()
        needed = None if search.fit else search.together()
        seconds = step_seconds(work, device)
    facts = assumptions(work, device)
    said = conclusion(search, device, needed=needed)
    if as_json:
        say_json(
            {
                "device": {"name": device.name, "memory": device.memory},
                "fits": search.fit,
                "peak": found.peak,
                "peaks": found.peaks,
                "stays": found.stays,
                **{name: getattr(found, name) for name in PHASES},
                "micro_batch_tokens": found.micro_batch_tokens,
                "most_micro_batch_tokens": found.most_tokens,
                "sequences_at_once": found.slots,
                "seconds": seconds,
                "options": {option.text: option.found.peak for option in options},
                "together": {} if needed is None else dict(needed.keys),
                "together_peak": None if needed is None else needed.found.peak,
                "not_possible": search.refused,
                "conclusion": said,
                "assumptions": facts,
            }
        )
        return
    listed = Text("\n".join(f"· {fact}" for fact in facts), style="dim")
    parts = (render(found), sizes_of(found, work, seconds=seconds), advice(options))
    Terminal().print(Group(*parts, listed, Text(f"\n{said}", style="bold")))
    if needed is not None:
        say(to_write(source, overrides, search=search, needed=needed))


def recipe_of(source: str, overrides: Sequence[str]) -> Resolved:
    """A recipe file, or GRPO on a model by its name, with ``--section.key value`` put over it."""
    if source.endswith(".toml"):
        recipe = resolve(read_recipe(source, overrides))
        if "rl" not in recipe.stages:
            raise ValueError(f"plan: {source} has no stage rl, and plan covers no other stage")
        return recipe
    values: dict[str, Any] = {"model": {"name": source}, "rl": {}}
    return resolve(recipe_from_dict(values, overrides=overrides), supplied=("task", "rewards"))


def parse_shape(text: str) -> dict[str, Any]:
    """``hidden=64,layers=2,tied=false`` as numbers and words.

    >>> parse_shape("hidden=64,tied=false,family=qwen2")
    {'hidden': 64, 'tied': False, 'family': 'qwen2'}
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ValueError(f"--shape: {part!r} is not name=number; write hidden=2048,layers=16,…")
        words = {"true": True, "false": False}
        found[name] = int(value) if value.isdigit() else words.get(value.lower(), value)
    return found


def gibibytes(count: float) -> str:
    """Bytes as GiB, or MiB where that is little."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**26 else f"{count / 2**20:.2f} MiB"


def render(found: Footprint) -> Table:
    """Each part and what it takes; then the peak of each phase."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("part")
    table.add_column("memory", justify="right")
    for name, size in found.stays.items():
        table.add_row(name, gibibytes(size))
    for phase_name, told in PHASES.items():
        parts: Mapping[str, float] = getattr(found, phase_name)
        if parts:
            listed = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items())
            table.add_row(f"{told}: {listed}", gibibytes(sum(parts.values())), style="dim")
    table.add_section()
    for phase_name, peak in found.peaks.items():
        if getattr(found, phase_name):
            table.add_row(f"peak of {phase_name}", gibibytes(peak))
    table.add_row("peak", gibibytes(found.peak), style="bold")
    return table


def sizes_of(found: Footprint, work: Work, *, seconds: Mapping[str, float]) -> Text:
    """What learns, how large batches are, and how long a step takes."""
    count = found.micro_batch_tokens
    auto = " (chosen automatically)" if work.micro_batch_tokens == "auto" else ""
    sampled = ""
    if work.samples_here:
        turns = "" if found.slots >= work.sequences else f" of {work.sequences}, in turns"
        sampled = f"; {counted(found.slots, 'sequence')} sampled at once{turns}"
    each = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    share = found.trained / found.weights
    most = f"{found.most_tokens:,} would fit" if found.most_tokens else "no size fits"
    return Text(
        f"{found.weights / 1e6:,.1f} million weights, {share:.0%} of them trained\n"
        f"micro-batches of {count:,} tokens{auto}, {most}{sampled}; more prompts or larger groups "
        "take more micro-batches, not more memory\n"
        f"a step takes about {sum(seconds.values()):.3g} s ({each}): an estimate"
    )


def advice(options: Sequence[Option]) -> Text:
    """What each option would bring the peak to."""
    if not options:
        return Text()
    lines = [f"  with {option.text}: {gibibytes(option.found.peak)}" for option in options]
    return Text("\n".join(("less memory:", *lines)))


def assumptions(work: Work, device: Device) -> list[str]:
    """What the numbers stand on."""
    from posttrain.estimate.gpus import shares
    from posttrain.estimate.parts import CONTEXT

    moving, computing = shares(work)
    measured = ", as a model of 135 million weights did on an H200" if work.device == "cuda" else ""
    own = "" if work.samples_here else "; engines elsewhere are not counted"
    rates = f"{device.bytes_per_second / 1e12:.3g} TB/s, {device.flops_per_second / 1e12:.3g}"
    found = [
        f"{device.name}: {gibibytes(device.memory)}, {rates} TFLOP/s ({device.source})",
        f"{work.prompts} prompts of {work.prompt_tokens} tokens (--prompt-tokens) × {work.group} "
        f"completions of {work.new_tokens}, all of full length{own}",
        f"layers {'compiled' if work.compiled else 'as they are'}: sampling at {moving:.0%} of "
        f"those bytes, learning at {computing:.1%} of the operations{measured}",
    ]
    if work.device == "cuda":
        found.append(
            f"{gibibytes(CONTEXT)} are reserved for the driver; a reward model is not counted"
        )
    return found


def conclusion(search: Search, device: Device, *, needed: Option | None) -> str:
    """Whether it fits, and what would make it."""
    peak, memory = gibibytes(search.found.peak), gibibytes(device.memory)
    if search.fit:
        return f"It fits: {peak} of {memory}."
    if needed is not None:
        told = f"It would fit with {needed.text}: {gibibytes(needed.found.peak)}."
        return f"It does not fit: {peak} of {memory}. {told}"
    refused = "".join(f"\nNot tried: {why}" for why in search.refused)
    tried = "and no combination of the options is enough; take a smaller model."
    return f"It does not fit: {peak} of {memory}, {tried}{refused}"


def to_write(source: str, overrides: Sequence[str], *, search: Search, needed: Option) -> str:
    """What to run, or to write into a recipe, for what is needed; and what to beware of then."""
    more = as_overrides(needed.keys)
    before = cautions(search.recipe)
    told = [caution for caution in cautions(search.read(more)) if caution not in before]
    if needed.keys.get("adapter.quantize") is not None and search.work.device == "cuda":
        told.append("adapter.quantize: four bits have not been measured on a GPU yet")
    if source.endswith(".toml"):
        lines = [command_line("posttrain", "run", source, *overrides, *more)]
    else:
        tables: dict[str, Any] = {}
        for key, value in needed.keys.items():
            put_key(tables, tuple(key.split(".")), value=value)
        lines = ["# in a recipe", write_toml(tables).rstrip()]
    return "\n".join(("", *lines, *(f"Caution: {caution}" for caution in told)))
