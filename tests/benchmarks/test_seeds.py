"""Results of several seeds: the interval by hand, what is taken from a run, what is refused."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe as small_recipe
from small_runs import small_run

from posttrain.config import recipe_from_dict, resolve
from posttrain.config.toml import write_toml

FOLDER = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(FOLDER)
    import jobs
    import results_page
    import seeds
    import sweep


def test_the_interval_of_seeds_that_differ() -> None:
    """p = 0.8, s = 0.1: 4.303 · 0.1 · √(4/3) = 0.496870; by chance only 1.96 · 0.04 · √(4/3)."""
    low, high = seeds.prediction_interval([0.7, 0.8, 0.9], problems=100)
    assert low == pytest.approx(0.8 - 0.4968676, rel=1e-6)
    assert high == 1.0


def test_the_interval_of_seeds_that_agree() -> None:
    """All right: q = (2·98 + 1)/(2·98 + 2) = 197/198; 1.96 · √(q(1 − q)/98) · √1.5."""
    low, high = seeds.prediction_interval([1.0, 1.0], problems=98)
    assert low == pytest.approx(1 - 1.96 * math.sqrt(197 / 198**2 / 98 * 1.5), rel=1e-6)
    assert high == 1.0
    # Few problems: the chance of single answers is more than the spread of the seeds.
    low, _ = seeds.prediction_interval([0.5, 0.5 + 1e-9, 0.5 - 1e-9], problems=100)
    assert low == pytest.approx(0.5 - 1.96 * 0.05 * math.sqrt(4 / 3), rel=1e-6)


def test_the_interval_needs_two_seeds_and_knows_more_than_ten() -> None:
    assert seeds.prediction_interval([0.5], problems=100) is None
    values = [0.4, 0.6] * 6
    half = 2.262 * 0.1 * math.sqrt(12 / 11) * math.sqrt(13 / 12)
    low, high = seeds.prediction_interval(values, problems=10**6)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe as a file, and two finished runs of it."""
    folder = tmp_path_factory.mktemp("seeds")
    changes = {"rl": {"evaluate_every": 2}, "run": {"threads": 1, "seed": 0}, "rewards": None}
    given = small_recipe(folder / "0", **changes)
    folders = [folder / "0", folder / "1"]
    for seed, place in enumerate(folders):
        small_run(given | {"run": given["run"] | {"seed": seed, "folder": str(place)}})
    path = folder / "small.toml"
    path.write_text("# A small one.\n#\n# Before  nothing\n\n" + write_toml(given))
    return {"recipe": path, "folders": folders}


def test_a_result_is_what_the_runs_say(made: dict[str, Any], tmp_path: Path) -> None:
    found = seeds.read_seeds([*made["folders"][::-1], tmp_path / "not begun"])
    result = seeds.result(found, name="small", recipe=made["recipe"])
    summaries = [json.loads((place / "summary.json").read_text()) for place in made["folders"]]
    assert [each["seed"] for each in result["seeds"]] == [0, 1]
    assert [each["after"] for each in result["seeds"]] == [s["accuracy_after"] for s in summaries]
    assert result["problems"] == summaries[0]["problems"] == 10
    assert result["hardware"].startswith("a CPU (")
    assert result["about"] == ["A small one.", "", "Before  nothing"]
    lines = (made["folders"][0] / "rl" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = result["seeds"][0]["curve"]
    assert curve["step"] == [0, 1, 2, 3]
    assert [value is not None for value in curve["accuracy"]] == [True, False, True, True]
    seconds = sum(record.get("time/step", 0.0) for record in records)
    assert curve["minutes"][-1] == pytest.approx(seconds / 60, abs=5e-4)
    assert curve["entropy"][-1] == pytest.approx(records[-1]["objective/entropy"], abs=5e-5)
    # What is published is the recipe with every default, and nothing of the machine.
    again = resolve(recipe_from_dict(result["config"]))
    assert again.rl is not None
    assert again.rl.steps == 3
    assert str(made["recipe"].parent) not in json.dumps(result)
    seeds.write_result(tmp_path / "small.json", result)
    assert json.loads((tmp_path / "small.json").read_text()) == json.loads(json.dumps(result))


def test_what_the_task_gave_is_published(made: dict[str, Any]) -> None:
    """Whatever a later version's task gives, the same rewards and the same check run again."""
    found = seeds.read_seeds(made["folders"])
    config = seeds.result(found, name="small", recipe=made["recipe"])["config"]
    assert config["task"]["accuracy"] == {"name": "numeric"}
    numeric = config["rewards"]["numeric"]
    assert (list(config["rewards"]), numeric["weight"]) == (["numeric"], 1.0)
    assert numeric["extract"] == "answer"  # the task's choice
    assert numeric["tolerance"] == 0.0  # the reward's default
    assert resolve(recipe_from_dict(config)).rewards == config["rewards"]
    own = {"exact": {"weight": 1.0}}
    used = {"accuracy_by": "numeric", "weights": {"exact": 1.0, "numeric": 0.0}}
    used["options"] = {"exact": {}, "numeric": {"extract": "answer"}}
    both = seeds._with_rewards({"task": {"name": "arithmetic"}, "rewards": own}, used)
    assert both["rewards"] == own
    assert both["task"]["accuracy"] == {"name": "numeric", "extract": "answer"}
    assert seeds._with_rewards(both, {"accuracy_by": "numeric", "weights": {}}) == both  # older


def test_runs_of_differing_code_are_no_result_unless_asked_for(made: dict[str, Any]) -> None:
    found = json.loads(json.dumps(seeds.read_seeds(made["folders"])))
    found[1]["code"]["torch"] = "2.0"
    seeds.result(found, name="small", recipe=made["recipe"])
    found[1]["code"]["source"] = "another"
    with pytest.raises(ValueError, match=r"seeds 0 and 1: .* code: source: .* → .*any-source"):
        seeds.result(found, name="small", recipe=made["recipe"])
    seeds.result(found, name="small", recipe=made["recipe"], any_source=True)
    found[1]["rewards"]["options"]["numeric"]["extract"] = "last_number"
    with pytest.raises(ValueError, match=r"differing rewards: options\.numeric\.extract"):
        seeds.result(found, name="small", recipe=made["recipe"], any_source=True)


def test_runs_of_another_recipe_are_no_result_of_this_one(made: dict[str, Any]) -> None:
    found = seeds.read_seeds(made["folders"])
    with pytest.raises(ValueError, match=r"seed 0: is not a run of this .*rl\.steps: 4 → 3"):
        seeds.result(found, name="small", recipe=made["recipe"], overrides=["--rl.steps", "4"])


def test_a_key_that_is_newer_than_the_runs_is_not_published(made: dict[str, Any]) -> None:
    found = json.loads(json.dumps(seeds.read_seeds(made["folders"])))
    for seed in found:
        del seed["config"]["rl"]["audit"]
    result = seeds.result(found, name="small", recipe=made["recipe"])
    assert "audit" not in result["config"]["rl"]
    found[1]["config"]["rl"]["gone_since"] = 1
    with pytest.raises(ValueError, match=r"seed 1: is not a run .*rl\.gone_since: unset → 1"):
        seeds.result(found, name="small", recipe=made["recipe"])


def test_an_unfinished_run_is_shown_and_not_counted(made: dict[str, Any], tmp_path: Path) -> None:
    cut = tmp_path / "2"
    (cut / "rl").mkdir(parents=True)
    whole = made["folders"][0]
    for name in ("config.json", "rl/metrics.jsonl"):
        (cut / name).write_bytes((whole / name).read_bytes())
    found = seeds.read_seeds([*made["folders"], cut])
    result = seeds.result(found, name="small", recipe=made["recipe"])
    assert len(result["seeds"]) == 2
    row = seeds.table({"small": found}).splitlines()[-1]
    assert "unfinished (0.0 at step 3)" in row
    seeds.draw({"small": found}, tmp_path / "curves.png", source="drawn from this")
    assert b"drawn from this" in (tmp_path / "curves.png").read_bytes()


class Ended:
    """A process that ends with a code, after it was looked at a few times."""

    def __init__(self, code: int, looks: int = 1) -> None:
        self.returncode, self._looks, self.stopped, self.awaited = code, looks, False, False

    def poll(self) -> int | None:
        self._looks -= 1
        return None if self._looks > 0 else self.returncode

    def terminate(self) -> None:
        self.stopped = True

    def wait(self) -> int:
        self.awaited = True
        return self.returncode


def _jobs(num: int) -> list[jobs.Job]:
    return [
        jobs.Job(recipe=Path("r.toml"), overrides=(), seed=seed, folder=Path(f"runs/{seed}"))
        for seed in range(num)
    ]


def test_runs_go_side_by_side_and_one_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running, most, started, calls = set[int](), [], [], []

    class Process(Ended):
        def __init__(self, seed: int, *, looks: int) -> None:
            super().__init__(2 if seed == 1 else 0, looks)
            self._seed = seed

        def poll(self) -> int | None:
            code = super().poll()
            running.difference_update(() if code is None else {self._seed})
            return code

    def start(job: jobs.Job) -> Process:
        started.append(job.seed)
        running.add(job.seed)
        most.append(len(running))
        return Process(job.seed, looks=3 if job.seed == 0 else 1)

    monkeypatch.setattr(jobs.Job, "start", start)
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)
    well = jobs.run_all(
        _jobs(4), parallel=2, minutes=math.inf, after_each=lambda: calls.append(len(started))
    )
    assert not well
    assert started == [0, 1, 2, 3]
    assert max(most) == 2
    assert len(calls) == 5  # after each of four, and at the end
    assert "runs/1: failed, see runs/1.log" in capsys.readouterr().out


def test_after_the_minutes_what_runs_is_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process, calls = Ended(143, looks=10**9), []
    monkeypatch.setattr(jobs.Job, "start", lambda job: process)
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)
    assert not jobs.run_all(
        _jobs(2), parallel=1, minutes=0.0, after_each=lambda: calls.append("written")
    )
    assert process.stopped
    assert calls == ["written"]
    assert "not finished: runs/0, runs/1" in capsys.readouterr().out


def test_runs_are_waited_for_where_their_result_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = [Ended(0), Ended(143, looks=10**9)]
    monkeypatch.setattr(jobs.Job, "start", lambda job: processes[job.seed])
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)

    def write() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        jobs.run_all(_jobs(2), parallel=2, minutes=math.inf, after_each=write)
    assert (processes[1].stopped, processes[1].awaited) == (True, True)


def test_the_variants_of_a_sweep_are_overrides_of_its_recipe() -> None:
    asked = {
        "base": {"rl": {"steps": 4}},
        "variants": {"plain": {}, "higher": {"rl": {"loss": {"clip_high": 0.28}}}},
    }
    base = ["--rl.steps", "4"]
    assert sweep.chosen(asked, None) == {
        "plain": base,
        "higher": [*base, "--rl.loss.clip_high", "0.28"],
    }
    assert list(sweep.chosen(asked, ["plain"])) == ["plain"]
    with pytest.raises(ValueError, match="no such variant"):
        sweep.chosen(asked, ["lower"])


def test_a_sweep_is_read_from_runs_made_elsewhere_if_they_are_its_own(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run is started; one of other settings than its variant has is refused."""
    table = tmp_path / "small.toml"
    whole = f'recipe = "{made["recipe"]}"\nseeds = [0, 1]\n[variants.plain]\n'
    table.write_text(whole)
    for seed, folder in enumerate(made["folders"]):
        (tmp_path / f"plain-{seed}").symlink_to(folder)
    asked = ["sweep.py", str(table), "--from-runs", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*asked, "--out", str(tmp_path / "out")])
    monkeypatch.setattr(sweep, "run_all", None)
    sweep.main()
    found = results_page.read(tmp_path / "out.json")
    assert [seed["variant"] for seed in found["seeds"]] == ["plain", "plain"]
    last = found["seeds"][0]["curve"]["agree"][-1]
    assert last is not None
    row = seeds.table({"plain": found["seeds"][:1]}).splitlines()[-1]
    known = [value for value in found["seeds"][0]["curve"]["accuracy"] if value is not None]
    assert f"| {100 * sum(known) / len(known):.1f} % |" in row  # fewer than five: all of them
    table.write_text(f"{whole}rl.steps = 4\n")
    with pytest.raises(ValueError, match=r"is not a run of this .*rl\.steps: 4 → 3"):
        sweep.main()


@pytest.mark.parametrize("path", results_page.files(FOLDER / "sweeps"), ids=lambda path: path.stem)
def test_a_published_sweep_is_what_its_table_asks_for(path: Path) -> None:
    asked = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))
    found = results_page.read(path)
    assert found["recipe"] == asked["recipe"]
    told = {seed["variant"]: seed["overrides"] for seed in found["seeds"]}
    assert told == sweep.chosen(asked, None)
    assert {seed["seed"] for seed in found["seeds"]} == set(asked["seeds"])


@pytest.mark.parametrize("path", results_page.files(FOLDER / "results"), ids=lambda path: path.stem)
def test_every_published_result_holds(path: Path) -> None:
    """Its interval follows from its seeds, and its recipe is one that this version can run."""
    found = results_page.read(path)
    after = [seed["after"] for seed in found["seeds"]]
    interval = seeds.prediction_interval(after, problems=found["problems"])
    assert interval is not None
    assert found["name"] == path.stem
    assert found["interval"] == [round(bound, 4) for bound in interval]
    assert found["mean"] == pytest.approx(sum(after) / len(after), abs=5e-5)
    resolve(recipe_from_dict(found["config"]))


def test_the_page_says_what_a_result_began_from_and_bears_a_run_without_entropy() -> None:
    path = FOLDER / "results" / "gsm8k.json"
    found = results_page.read(path)
    found["seeds"][0]["entropy"] = None
    page = "\n".join(results_page._result(path, found))
    assert "dequantised from that Q4_K_M GGUF" in page
    command = f"posttrain run recipes/{found['recipe']} {' '.join(found['overrides'])}"
    assert f"Command   {command}\n" in page  # the recipe's header and the result: one start
    assert "| 0 | 27.7% | 35.0% | – | 40 | 7.5 |" in page
    assert "The curve of accuracy is of the first 300 of these problems; before, after\n" in page


def test_the_page_of_results_is_up_to_date() -> None:
    page = (results_page.DOCS / "results.md").read_text(encoding="utf-8")
    assert page == results_page.page(), "run: python benchmarks/results_page.py"
    for path in [*results_page.files(results_page.RESULTS), *results_page.files(FOLDER / "sweeps")]:
        drawn = (results_page.DOCS / results_page.picture(path)).read_bytes()
        assert results_page.digest(path).encode() in drawn, "run: python benchmarks/results_page.py"
