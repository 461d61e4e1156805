"""One recipe under a table of overrides, several seeds of each: a table, a picture, one JSON.

    python benchmarks/sweep.py benchmarks/sweeps/entropy.toml --parallel 4 --minutes 9 --out sweep

writes ``sweep.json`` and ``sweep.png``, anew whenever a run has ended; the same command goes on
where it was. ``--from-runs`` starts none, and reads what runs made elsewhere have left in FOLDER.
The table file::

    recipe = "recipes/smollm2_arithmetic.toml"
    seeds = [0, 1]
    [base]                       # for all variants
    rl.steps = 100
    [variants.as_it_is]
    [variants.clip_higher]
    rl.loss.clip_high = 0.28

All variants are begun with the first seed before any is with the second. Of runs beside each other
on one device the minutes say little about one alone, so the picture is over steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Job, add_running, run_all
from seeds import Seed, check_runs, draw, read_seeds, table, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="recipe, seeds and variants, in TOML")
    parser.add_argument("--seeds", nargs="+", type=int, help="others than the table says")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants alone")
    parser.add_argument("--folder", type=Path, help="for the runs; runs/NAME by default")
    parser.add_argument("--out", type=Path, required=True, help="OUT.json and OUT.png are written")
    parser.add_argument("--from-runs", action="store_true", help="read FOLDER, start no run")
    add_running(parser)
    given, overrides = parser.parse_known_args()
    asked = tomllib.loads(given.table.read_text(encoding="utf-8"))
    variants = {name: [*v, *overrides] for name, v in chosen(asked, given.only).items()}
    folder = given.folder or Path("runs") / given.table.stem
    jobs = {
        (name, seed): Job(
            recipe=Path(asked["recipe"]),
            overrides=tuple(variant),
            seed=seed,
            folder=folder / f"{name}-{seed}",
        )
        for seed in given.seeds or asked["seeds"]
        for name, variant in variants.items()
    }

    def write() -> None:
        groups = {
            name: read_seeds([job.folder for (of, _), job in jobs.items() if of == name])
            for name in variants
        }
        for name, seeds in groups.items() if given.from_runs else ():
            check_runs(seeds, Path(asked["recipe"]), overrides=variants[name])
        told = [
            {"variant": name, "overrides": variants[name], **_without_config(seed)}
            for name, seeds in groups.items()
            for seed in seeds
        ]
        content = {"recipe": asked["recipe"], "parallel": given.parallel, "seeds": told}
        write_result(given.out.with_suffix(".json"), content)
        draw(groups, given.out.with_suffix(".png"), over="step")
        print(table(groups), flush=True)

    if given.from_runs:
        write()
        return
    ended = run_all(jobs.values(), parallel=given.parallel, minutes=given.minutes, after_each=write)
    sys.exit(0 if ended else 1)


def chosen(asked: Mapping[str, Any], only: Sequence[str] | None) -> dict[str, list[str]]:
    """The overrides of each variant, as a command line has them."""
    unknown = set(only or ()) - set(asked["variants"])
    if unknown:
        raise ValueError(f"no such variant: {sorted(unknown)}; known: {list(asked['variants'])}")
    base = list(as_overrides(asked.get("base", {})))
    return {
        name: [*base, *as_overrides(changes)]
        for name, changes in asked["variants"].items()
        if not only or name in only
    }


def as_overrides(table: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Nested tables as ``--section.key value``.

    >>> list(as_overrides({"rl": {"loss": {"clip_high": 0.28}, "algorithm": "dapo"}}))
    ['--rl.loss.clip_high', '0.28', '--rl.algorithm', 'dapo']
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{within}{key}.")
        else:
            yield f"--{within}{key}"
            yield value if isinstance(value, str) else json.dumps(value)


def _without_config(seed: Seed) -> dict[str, Any]:
    return {key: value for key, value in seed.items() if key not in ("config", "rewards")}


if __name__ == "__main__":
    main()
