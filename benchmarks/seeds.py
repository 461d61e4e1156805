"""One recipe, several seeds: what came out of each, the interval for one more run, their curves.

    python benchmarks/seeds.py recipes/demo.toml --seeds 0 1 2 --parallel 2 --out seeds.png
    python benchmarks/seeds.py recipes/demo.toml --seeds 0 1 2 --result demo
    python benchmarks/seeds.py recipes/demo.toml --from-runs A B C --result demo

The second and third also write ``benchmarks/results/demo.json``, which ``posttrain reproduce demo``
reads; ``results_page.py`` makes a page of it. Of a run that was made elsewhere it takes
``config.json``, ``summary.json``, ``rl/metrics.jsonl`` and ``rl/rewards.json``. A run that was cut
short goes on when the same command is given again. All seeds have the same problems: a task that
makes its own has a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Job, add_running, run_all

from posttrain.config import read_recipe, resolve, to_dict
from posttrain.config.specs import NO_CHECK
from posttrain.runs import differences, merge_steps, read_json, read_metrics
from posttrain.runs.files import write_text
from posttrain.runs.folder import REWARDS
from posttrain.track.diagnosis.history import series

RESULTS = Path(__file__).parent / "results"
CURVES = {
    "accuracy": "eval/accuracy",
    "entropy": "objective/entropy",
    "reward": "reward/mean",
    "agree": "rollout/groups_without_signal",
}
PANELS = {
    "accuracy": "Held-out accuracy, greedy",
    "reward": "Training reward, mean of 5 steps",
    "entropy": "Entropy (nats per token), mean of 5 steps",
}
AXES = {"minutes": "minutes of sampling and learning", "step": "step"}
LAST = 10  # steps whose mean is the entropy "at the end"
EVALUATIONS = 5  # evaluations whose mean is steadier than the last alone
# Student's t, 97.5 %, for 1 to 9 degrees of freedom; with more than ten seeds that of ten.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.960
NOT_THE_RECIPES = ("run.folder", "run.seed", "code", "contents")
OF_ALL = ("config", "rewards", "problems", "hardware")  # what all seeds of a result share

Seed = Mapping[str, Any]
"""What came of one run: see :func:`seed_of`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--from-runs", nargs="+", type=Path, help="run folders that are there")
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"), help="for the runs")
    parser.add_argument("--out", type=Path, help="picture of the curves")
    parser.add_argument("--result", metavar="NAME", help="write RESULTS/NAME.json")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--hardware", help="in words, if not as the runs say")
    parser.add_argument(
        "--any-source", action="store_true", help="also publish runs of differing code"
    )
    add_running(parser)
    given, overrides = parser.parse_known_args()

    def write() -> None:
        seeds = read_seeds(given.from_runs or [job.folder for job in jobs])
        if given.result and any(seed["minutes"] for seed in seeds):
            made = result(
                seeds,
                name=given.result,
                recipe=given.recipe,
                overrides=overrides,
                hardware=given.hardware,
                any_source=given.any_source,
            )
            write_result(given.results / f"{given.result}.json", made)
        if given.out is not None:
            draw({f"seed {seed['seed']}": [seed] for seed in seeds}, given.out)

    jobs = [
        Job(
            recipe=given.recipe,
            overrides=tuple(overrides),
            seed=seed,
            folder=given.folder / str(seed),
        )
        for seed in given.seeds
    ]
    ended = True
    if given.from_runs:
        write()
    else:
        ended = run_all(jobs, parallel=given.parallel, minutes=given.minutes, after_each=write)
    print(table({"": read_seeds(given.from_runs or [job.folder for job in jobs])}))
    sys.exit(0 if ended else 1)


def read_seeds(folders: Sequence[Path]) -> list[Seed]:
    """What came of the runs in these folders that have logged anything, finished or not."""
    begun = [folder for folder in folders if (folder / "rl" / "metrics.jsonl").exists()]
    return [seed_of(folder) for folder in begun]


def seed_of(folder: Path) -> Seed:
    """What came of one run; ``minutes`` are those of the whole run, None where it is unfinished.

    The minutes of the curve are those of sampling and learning, Σ ``time/step``: without loading,
    supervised stages and evaluations.
    """
    config = dict(read_json(folder / "config.json"))
    summary = _read(folder / "summary.json")
    records = merge_steps(read_metrics(folder / "rl" / "metrics.jsonl"))
    entropies = series(records, CURVES["entropy"])[-LAST:]
    return {
        "seed": config["run"]["seed"],
        "before": summary.get("accuracy_before"),
        "after": summary.get("accuracy_after"),
        "problems": summary.get("problems"),
        "steps": records[-1]["step"] if records else 0,
        "minutes": round(summary["seconds"] / 60, 2) if summary else None,
        "entropy": round(statistics.fmean(entropies), 4) if entropies else None,
        "hardware": summary.get("hardware"),
        "code": config["code"],
        "curve": _curve(records),
        "config": config,
        "rewards": _read(folder / "rl" / REWARDS),
    }


def _read(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.exists() else {}


def _curve(records: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    minutes, spent = [], 0.0
    for record in records:
        spent += record.get("time/step", 0.0) / 60
        minutes.append(round(spent, 3))
    curve: dict[str, list[float | None]] = {"step": [int(record["step"]) for record in records]}
    curve["minutes"] = [*minutes]
    for name, metric in CURVES.items():
        values = [record.get(metric) for record in records]
        curve[name] = [None if value is None else round(value, 4) for value in values]
    return curve


def prediction_interval(values: Sequence[float], *, problems: int) -> tuple[float, float] | None:
    """Where the accuracy of one more run falls, in 95 of 100 cases; None for fewer than two seeds.

    ``p ± max(t·s, z·√(q(1 − q)/N)) · √(1 + 1/n)``, cut to [0, 1]: p is the mean and s the sample
    deviation of the n accuracies, t Student's 97.5 % with n − 1 degrees of freedom, z = 1.960, N
    the test problems, and q = (nNp + 1)/(nN + 2), which is neither 0 nor 1. The second term is
    what a few seeds that happen to agree cannot tell: each answer is right or wrong by chance.

    >>> prediction_interval([0.5, 0.6], problems=10**6)[0]  # 0.55 − 12.706 · 0.0707 · √1.5
    0.0
    """
    if len(values) < 2:
        return None
    num, mean = len(values), statistics.fmean(values)
    student = STUDENT[min(num - 1, len(STUDENT)) - 1]
    shrunk = (num * problems * mean + 1) / (num * problems + 2)
    by_chance = NORMAL * math.sqrt(shrunk * (1 - shrunk) / problems)
    half = max(student * statistics.stdev(values), by_chance) * math.sqrt(1 + 1 / num)
    return max(0.0, mean - half), min(1.0, mean + half)


def result(
    seeds: Sequence[Seed],
    *,
    name: str,
    recipe: Path,
    overrides: Sequence[str] = (),
    hardware: str | None = None,
    any_source: bool = False,
) -> dict[str, Any]:
    """A result as it is published, of the finished ones of these runs of one recipe.

    Its config names what the task's code gave them, rewards and the check of answers: another
    version may give others. ``any_source`` also takes runs whose code differs.
    """
    done = sorted((seed for seed in seeds if seed["minutes"]), key=lambda seed: seed["seed"])
    config = check_runs(done, recipe, overrides=overrides)
    config = _with_rewards(config, _same(done, "rewards"))
    if not any_source:
        _same(done, "code")
    named = {hardware or seed["hardware"] for seed in done}
    sizes = {seed["problems"] for seed in done}
    if len(named) != 1 or len(sizes) != 1:
        raise ValueError(
            f"{name}: one result is of one kind of hardware ({named}) and one number "
            f"of test problems ({sizes})"
        )
    problems = sizes.pop()
    interval = prediction_interval([seed["after"] for seed in done], problems=problems)
    return {
        "name": name,
        "recipe": recipe.name,
        "overrides": list(overrides),
        "about": head(recipe),
        "model": config["model"]["name"],
        "task": config["task"]["name"],
        "hardware": named.pop(),
        "problems": problems,
        "mean": round(statistics.fmean(seed["after"] for seed in done), 4),
        "interval": interval and [round(bound, 4) for bound in interval],
        "config": config,
        "seeds": [{key: seed[key] for key in seed if key not in OF_ALL} for seed in done],
    }


def head(recipe: Path) -> list[str]:
    """The comment that a recipe begins with: what it is, what it needs, how to get that."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    num = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:num]]


def _published(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what every run has of its own."""
    given = {key: value for key, value in config.items() if key not in NOT_THE_RECIPES}
    run = {k: v for k, v in config["run"].items() if f"run.{k}" not in NOT_THE_RECIPES}
    return dict(json.loads(json.dumps({**given, "run": run})))


def _known(config: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that there were not yet when the run was made.

    >>> _known({"rl": {"steps": 6, "new": 1}, "newer": {}}, {"rl": {"steps": 6}})
    {'rl': {'steps': 6}}
    """
    return {
        key: _known(value, then[key])
        if isinstance(value, Mapping) and isinstance(then[key], Mapping)
        else value
        for key, value in config.items()
        if key in then
    }


def check_runs(seeds: Sequence[Seed], recipe: Path, *, overrides: Sequence[str]) -> dict[str, Any]:
    """Refuse runs that are not of this recipe with these overrides; its config as they knew it."""
    asked = _published(to_dict(resolve(read_recipe(recipe, overrides))))
    config = _known(asked, seeds[0]["config"])
    for seed in seeds:
        _check(seed, config)
    return config


def _check(seed: Seed, config: Mapping[str, Any]) -> None:
    """A run is published as one of this recipe only where it is one; folders may lie elsewhere."""
    changes = differences(_named(config), _named(_published(seed["config"])), ignore=("sha256",))
    if changes:
        raise ValueError(
            f"seed {seed['seed']}: is not a run of this recipe with these overrides: "
            f"{'; '.join(changes)}"
        )
    if seed["after"] is None:
        raise ValueError(f"seed {seed['seed']}: has no accuracy; give the recipe an [eval] section")


def _same(seeds: Sequence[Seed], key: str) -> dict[str, Any]:
    """What is the same in all runs; the versions of libraries may differ."""
    for seed in seeds:
        first, other = (dict(each[key]) for each in (seeds[0], seed))
        changes = differences(first, other, ignore=("torch", "transformers"))
        if changes:
            flag = "; --any-source publishes them all the same" if key == "code" else ""
            raise ValueError(
                f"seeds {seeds[0]['seed']} and {seed['seed']}: are runs of differing {key}: "
                f"{'; '.join(changes)}{flag}"
            )
    return dict(seeds[0][key])


def _with_rewards(config: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the rewards and the check of answers that its task gave, options included.

    >>> used = {"accuracy_by": "sort", "weights": {"sort": 1.0}, "options": {"sort": {}}}
    >>> _with_rewards({"task": {"name": "sort"}}, used)
    {'task': {'accuracy': {'name': 'sort'}, 'name': 'sort'}, 'rewards': {'sort': {'weight': 1.0}}}
    """
    check, options = used.get("accuracy_by", ""), used.get("options")
    if options is None:  # a run from before they were kept
        return dict(config)
    table = config.get("rewards") or {
        name: {"weight": weight, **options[name]}
        for name, weight in used["weights"].items()
        if not name.startswith("task:")  # the task's check beside a reward of the same name
    }
    added = {} if check in ("", *table) else options[check]
    asked = {"name": check or NO_CHECK, **added}
    given = {} if check.startswith("task:") else {"accuracy": asked}
    return {**config, "task": {**given, **config["task"]}, "rewards": table}


def _named(value: Any) -> Any:
    """The same, with the last name of every path alone."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and "/" in value else value


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a line for each entry and each seed, so that a change can be read."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if key in ("seeds", "about") and value:
            inner = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value)
            text = f"[\n{inner}\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def table(groups: Mapping[str, Sequence[Seed]]) -> str:
    """Rows of Markdown, one for each group of seeds: accuracy, entropy at the end, minutes."""
    rows = [
        f"| | accuracy before | after | of each seed | last {EVALUATIONS} evaluations "
        f"| entropy, last {LAST} steps | groups that agree, last {LAST} steps | minutes |",
        "|---" * 8 + "|",
    ]
    for name, seeds in groups.items():
        done = [seed for seed in seeds if seed["after"] is not None]
        each = [f"{100 * seed['after']:.1f}" for seed in done]
        each += [_so_far(seed) for seed in seeds if seed["after"] is None]
        cells = [
            spread([100 * seed["before"] for seed in done if seed["before"] is not None], " %"),
            spread([100 * seed["after"] for seed in done], " %"),
            ", ".join(each),
            spread([100 * mean for mean in _last(done, "accuracy", EVALUATIONS)], " %"),
            spread([seed["entropy"] for seed in done if seed["entropy"] is not None], digits=3),
            spread([100 * mean for mean in _last(done, "agree", LAST)], " %", digits=0),
            spread([seed["minutes"] for seed in done]),
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _last(seeds: Sequence[Seed], name: str, count: int) -> list[float]:
    """The mean of the last so many values of a curve, of each seed that has it."""
    known = [[v for v in seed["curve"].get(name, ()) if v is not None][-count:] for seed in seeds]
    return [statistics.fmean(values) for values in known if values]


def _so_far(seed: Seed) -> str:
    """Where an unfinished run was when it was last evaluated."""
    curve = seed["curve"]
    pairs = zip(curve["step"], curve["accuracy"], strict=True)
    known = [f"{100 * value:.1f} at step {step}" for step, value in pairs if value is not None]
    return f"unfinished ({known[-1] if known else 'not evaluated yet'})"


def spread(values: Sequence[float], unit: str = "", *, digits: int = 1) -> str:
    """Mean and sample deviation.

    >>> spread([80.0, 90.0, 100.0], " %")
    '90.0 ± 10.0 %'
    """
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return f"{mean}{unit}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}{unit}"


def draw(
    groups: Mapping[str, Sequence[Seed]], path: Path, *, over: str = "minutes", source: str = ""
) -> None:
    """One colour a group, one line a seed, one panel for each metric; ``source`` is kept in it."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.6), layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for number, (label, seeds) in enumerate(groups.items()):
            for first, seed in enumerate(seeds):
                curve = seed["curve"]
                pairs = zip(curve[over], curve[name], strict=True)
                known = [(x, value) for x, value in pairs if value is not None]
                values = [value for _, value in known]
                if name != "accuracy":
                    values = [
                        statistics.fmean(values[max(0, n - 4) : n + 1]) for n in range(len(values))
                    ]
                axis.plot(
                    [x for x, _ in known],
                    values,
                    linewidth=1.3,
                    color=plt.cm.tab20(number % 20) if len(groups) > 10 else f"C{number}",
                    label=None if first else label,
                )
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(AXES[over])
        axis.grid(axis="y", color="#dddddd")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_ylim(0, 1)
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Source": source} if source else {})
    plt.close(figure)


if __name__ == "__main__":
    main()
