"""The page docs/results.md, and its pictures, from benchmarks/results and benchmarks/sweeps.

python benchmarks/results_page.py
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from seeds import LAST, RESULTS, draw, head, table

from posttrain.runs.files import write_text

DOCS = Path(__file__).parents[1] / "docs"
RECIPES = Path(__file__).parents[1] / "recipes"
SWEEPS = Path(__file__).parent / "sweeps"
HEAD = """# Results

Every result here is the outcome of several seeds of one recipe, and can be had again:

```bash
posttrain reproduce            # lists them, with hardware and minutes
posttrain reproduce demo       # runs one here, and says whether it comes out the same
posttrain reproduce demo --seed 7 --out runs/again
```
"""
RULES = f"""## How to read them

`posttrain reproduce` takes the recipe as it was resolved then, every default included, and by
default the first seed that was not published. It ends with exit code 0 where the accuracy falls
into the published interval, and with 1 where it does not, or where the run began elsewhere: its
accuracy before RL is below the lowest or above the highest "before" of the seeds by more than
3.291·√(q(1 − q)/N), 99.9 % of the chance of single answers (N problems, q their mean as below), so
weights or data are others. A run that was evaluated on another number of problems, or of which
some answers could not be graded, is refused with exit code 2. A result that needs a model folder
says how to get it; `--model` names another folder of the same model.

**Accuracy** is the share of the test problems whose greedy answer is right, after training;
"before" is before RL. **Minutes** are of the whole run, evaluations included; those under the
curves are of sampling and learning alone. **Entropy** is in nats per token, the mean of the last
{LAST} steps.

**One run, 95 %** is a prediction interval, where the accuracy of one more run with another seed
should fall in 95 of 100 cases: p ± max(t·s, z·√(q(1 − q)/N)) · √(1 + 1/n), cut to 0 and 100 %. p is
the mean and s the sample deviation of the n seeds' accuracies, t Student's 97.5 % quantile with n −
1 degrees of freedom (4.303 for three seeds), z = 1.960, N the number of test problems, and q = (nNp
+ 1)/(nN + 2). The first term is the spread over seeds, the second the chance of single answers,
which a few seeds that happen to agree would hide. Other hardware, another torch and another seed
all change the roundings, and so the run: what is promised is the interval, not the bits.

This page is written by `python benchmarks/results_page.py` from the JSON files in
[benchmarks/results](../src/posttrain/results); `python benchmarks/seeds.py RECIPE --seeds 0 1 2
--result NAME` writes one, also from runs made elsewhere (`--from-runs`).
"""


def main() -> None:
    write_text(DOCS / "results.md", page())
    for path in [*files(RESULTS), *files(SWEEPS)]:
        found, over = read(path), "minutes"
        groups = {f"seed {seed['seed']}": [seed] for seed in found["seeds"]}
        if path.parent == SWEEPS:
            groups, over = variants(found), "step"
        draw(groups, DOCS / picture(path), over=over, source=digest(path))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def picture(path: Path) -> str:
    """Where the picture of a result or a sweep is, seen from the page."""
    return (
        f"images/results/{path.stem}.png"
        if path.parent == RESULTS
        else (f"images/results/sweep_{path.stem}.png")
    )


def digest(path: Path) -> str:
    """What a picture carries of the file it was drawn from."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def page() -> str:
    """The whole page."""
    results = {path: read(path) for path in files(RESULTS)}
    parts = [HEAD, _overview(results.values()), RULES]
    parts += ["\n".join(_result(path, found)) for path, found in results.items()]
    parts += ["\n".join(_sweep(path, read(path))) for path in files(SWEEPS)]
    return "\n".join(parts)


def _overview(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        "| result | before | after | one run, 95% | seeds | problems | minutes | hardware |",
        "|---" * 8 + "|",
    ]
    for found in results:
        seeds, (low, high) = found["seeds"], found["interval"]
        before = [seed["before"] for seed in seeds if seed["before"] is not None]
        cells = [
            f"[{found['name']}](#{found['name']})",
            percent(statistics.fmean(before)) if before else "–",
            percent(found["mean"]),
            f"{100 * low:.1f} to {percent(high)}",
            str(len(seeds)),
            f"{found['problems']:,}",
            f"{statistics.fmean(seed['minutes'] for seed in seeds):.1f}",
            found["hardware"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _result(path: Path, found: Mapping[str, Any]) -> Iterator[str]:
    low, high = found["interval"]
    about, _, needs = "\n".join(head(RECIPES / found["recipe"])).partition("\n\n")
    yield f"## {found['name']}\n"
    yield about + "\n"
    yield f"```text\n{needs}\n```\n"
    yield f"{_link(found)}: model `{found['model']}`, task `{found['task']}`,"
    yield f"on {found['hardware']}, with {_code(found['seeds'])}."
    yield f"{percent(found['mean'])} of {found['problems']:,} problems, mean of the seeds;"
    yield f"one run should give {100 * low:.1f} to {percent(high)}.\n"
    yield f"![Accuracy, reward and entropy over minutes, one line a seed]({picture(path)})\n"
    looked = min(found["config"]["rl"].get("evaluate_problems", 0), found["problems"])
    if 0 < looked < found["problems"]:
        yield f"The curve of accuracy is of the first {looked:,} of these problems; before, after"
        yield f"and the interval are of all {found['problems']:,}.\n"
    yield "| seed | before | after | entropy | steps | minutes |"
    yield "|---" * 6 + "|"
    for seed in found["seeds"]:
        before = "–" if seed["before"] is None else percent(seed["before"])
        entropy = "–" if seed["entropy"] is None else f"{seed['entropy']:.3f}"
        yield (
            f"| {seed['seed']} | {before} | {percent(seed['after'])} | {entropy} "
            f"| {seed['steps']} | {seed['minutes']:.1f} |"
        )
    yield ""


def _sweep(path: Path, found: Mapping[str, Any]) -> Iterator[str]:
    seeds = found["seeds"]
    sizes = {seed["problems"] for seed in seeds if seed["problems"]}
    devices = {seed["hardware"] for seed in seeds if seed["hardware"]}
    yield f"## The sweep {path.stem}\n"
    yield f"[Variants](../benchmarks/sweeps/{path.stem}.toml), beside its `[base]` if any, of"
    yield f"[{found['recipe']}](../{found['recipe']}): greedy accuracy on {_joined(sizes)}"
    yield f"problems{_deviation(seeds)}, on {_joined(devices)},"
    yield f"{found['parallel']} runs at once (which the minutes feel), with {_code(seeds)}.\n"
    yield table(variants(found)) + "\n"
    yield f"![Accuracy, reward and entropy over steps, one colour a variant]({picture(path)})\n"


def _deviation(seeds: Sequence[Mapping[str, Any]]) -> str:
    numbers = {seed["seed"] for seed in seeds}
    if len(numbers) == 1:
        return f", seed {numbers.pop()} alone"
    return ", mean ± sample deviation over the seeds"


def variants(sweep: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of a sweep by their variant."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for seed in sweep["seeds"]:
        groups.setdefault(seed["variant"], []).append(seed)
    return groups


def _link(found: Mapping[str, Any]) -> str:
    link = f"[recipes/{found['recipe']}](../recipes/{found['recipe']})"
    return f"{link} with `{' '.join(found['overrides'])}`" if found["overrides"] else link


def _code(seeds: Sequence[Mapping[str, Any]]) -> str:
    codes = [seed["code"] for seed in seeds]
    versions = {f"posttrain {code['posttrain']}, torch {code['torch']}" for code in codes}
    return f"{_joined(versions)} (source {_joined({code['source'][:8] for code in codes})})"


def _joined(names: set[Any]) -> str:
    return " and ".join(sorted(map(str, names)))


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


if __name__ == "__main__":
    main()
