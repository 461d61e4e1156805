"""``posttrain plan`` for one machine: what fits, part by part, as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from posttrain.config import read_recipe, recipe_from_dict, resolve
from posttrain.track.printable import counted
from posttrain.track.progress import loading, phase, showing
from posttrain.track.safe_terminal import Terminal, say_json

if TYPE_CHECKING:
    from posttrain.config import Resolved
    from posttrain.estimate.gpus import Device
    from posttrain.estimate.options import Option
    from posttrain.estimate.parts import Footprint
    from posttrain.estimate.work import Work

PHASES = {
    "sampling": "while completions are sampled",
    "asking": "while reference, critic or teacher are asked",
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
    recipe = recipe_of(source, overrides)
    with loading():
        from posttrain.estimate.gpus import find_device, step_seconds
        from posttrain.estimate.options import fits, helpful, together
        from posttrain.estimate.parts import footprint
        from posttrain.estimate.work import work_of
    device = find_device(gpu)
    sizes = None if shape is None else parse_shape(shape)
    with showing(), phase("counting"):
        work = work_of(recipe, device=device.kind, prompt_tokens=prompt_tokens, shape=sizes)
        found = footprint(work, device.memory)
        options = helpful(work, found, memory=device.memory)
        fit = fits(found, work, memory=device.memory)
        needed = [] if fit else together(work, options, memory=device.memory)
        seconds = step_seconds(work, device)
    facts = assumptions(work, device)
    said = conclusion(found, device, fit=fit, needed=needed)
    if as_json:
        say_json(
            {
                "device": {"name": device.name, "memory": device.memory},
                "fits": fit,
                "peak": found.peak,
                "peaks": found.peaks,
                "stays": found.stays,
                **{name: getattr(found, name) for name in PHASES},
                "micro_batch_tokens": found.micro_batch_tokens,
                "most_micro_batch_tokens": found.most_tokens,
                "sequences_at_once": found.slots,
                "seconds": seconds,
                "options": {option.text: option.found.peak for option in options},
                "together": [option.text for option in needed],
                "conclusion": said,
                "assumptions": facts,
            }
        )
        return
    listed = Text("\n".join(f"· {fact}" for fact in facts), style="dim")
    parts = (render(found), sizes_of(found, work, seconds=seconds), advice(options))
    Terminal().print(Group(*parts, listed, Text(f"\n{said}", style="bold")))


def recipe_of(source: str, overrides: Sequence[str]) -> Resolved:
    """A recipe file, or GRPO on a model by its name, with ``--section.key value`` put over it."""
    if source.endswith(".toml"):
        recipe = resolve(read_recipe(source, overrides))
        if "rl" not in recipe.stages:
            raise ValueError(f"plan: {source} has no stage rl, and plan speaks of no other")
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
    auto = " (chosen by itself)" if work.micro_batch_tokens == "auto" else ""
    sampled = ""
    if work.samples_here:
        turns = "" if found.slots >= work.sequences else f" of {work.sequences}, in turns"
        sampled = f"; {counted(found.slots, 'sequence')} sampled at once{turns}"
    each = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    share = found.trained / found.weights
    most = f"{found.most_tokens:,} would fit" if found.most_tokens else "none fits"
    return Text(
        f"{found.weights / 1e6:,.1f} million weights, of which {share:.0%} learn\n"
        f"micro-batches of {count:,} tokens{auto}, {most}{sampled}; more prompts or larger groups "
        "take more of them, not more memory\n"
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
    own = "" if work.samples_here else "; what samples elsewhere is not counted"
    rates = f"{device.bytes_per_second / 1e12:.3g} TB/s, {device.flops_per_second / 1e12:.3g}"
    found = [
        f"{device.name}: {gibibytes(device.memory)}, {rates} TFLOP/s ({device.source})",
        f"{work.prompts} prompts of {work.prompt_tokens} tokens (--prompt-tokens) × {work.group} "
        f"completions of {work.new_tokens}, none ends early{own}",
        f"layers {'compiled' if work.compiled else 'as they are'}: sampling at {moving:.0%} of "
        f"those bytes, learning at {computing:.1%} of the operations{measured}",
    ]
    if work.device == "cuda":
        found.append(f"{gibibytes(CONTEXT)} are left to the driver; a reward model is not counted")
    return found


def conclusion(found: Footprint, device: Device, *, fit: bool, needed: Sequence[Option]) -> str:
    """Whether it fits, and what would make it."""
    peak, memory = gibibytes(found.peak), gibibytes(device.memory)
    if fit:
        return f"It fits: {peak} of {memory}."
    if not needed:
        return (
            f"It does not fit: {peak} of {memory}, and no option is enough; take a smaller model."
        )
    words = ", ".join(option.text for option in needed)
    return f"It does not fit: {peak} of {memory}. With {words}: {gibibytes(needed[-1].found.peak)}."
