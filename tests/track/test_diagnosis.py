"""The diagnosis: each rule on histories written by hand, and what becomes of a finding."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosis_cases import (
    DYNAMIC,
    HEALTHY,
    HEALTHY_SETUPS,
    HELD_OUT,
    ILL,
    LASTS,
    SETUP,
    SETUPS,
    course,
    healthy,
    level,
    part,
    ramp,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from posttrain.config.describe import find_field
from posttrain.track import ConsoleTracker, JsonlTracker, Several, Stage
from posttrain.track.diagnosis import (
    RULES,
    Background,
    Diagnosing,
    Diagnosis,
    Finding,
    read_findings,
)

Records = Sequence[Mapping[str, float]]


def run(records: Records, setup: Background = SETUP) -> list[Finding]:
    """What is found on the way, with what is over."""
    diagnosis = Diagnosis(setup)
    for step, record in enumerate(records, start=1):
        diagnosis.feed(step, record)
    return diagnosis.findings


def finished(records: Records, setup: Background = SETUP) -> list[Finding]:
    """What is found at the end, and not before."""
    diagnosis = Diagnosis(setup)
    for step, record in enumerate(records, start=1):
        diagnosis.add_to_history(step, record)
    return diagnosis.finish()


def test_every_rule_has_its_history() -> None:
    assert list(ILL) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_an_illness_is_reported_once(name: str) -> None:
    (finding,) = run([*ILL[name], *ILL[name][-1:] * 5], SETUPS.get(name, SETUP))
    assert finding.rule == name
    assert finding.step >= 5 or name == "score_follows_length"  # that is said once, at the end
    assert finding.remedy in RULES[name].remedies.values()
    assert finding.until is None


@pytest.mark.parametrize("name", [name for name in RULES if name not in LASTS])
def test_it_is_over_when_it_has_passed_and_may_come_again(name: str) -> None:
    records = ILL[name]
    setup = SETUPS.get(name, SETUP)
    first, second = run([*records, *[healthy(name)] * 60, *records], setup)
    assert (first.rule, second.rule) == (name, name)
    assert first.until is not None
    assert first.until < second.step
    assert first.until > len(records)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_noise_is_no_finding(name: str) -> None:
    assert run(HEALTHY[name]) == []


@pytest.mark.parametrize("name", HEALTHY_SETUPS)
def test_what_only_looks_ill_is_no_finding(name: str) -> None:
    """Neither on the way nor at the end."""
    setup, records = HEALTHY_SETUPS[name]
    assert run(records, setup) == []
    assert finished(records, setup) == []


@pytest.mark.parametrize("name", [name for name in RULES if name != "score_follows_length"])
def test_a_single_bad_step_is_no_finding(name: str) -> None:
    """The worst step of the illness, alone among healthy ones."""
    records = [healthy(name)] * 25 + [ILL[name][-1]] + [healthy(name)] * 25
    assert run(records, SETUPS.get(name, SETUP)) == []


AGREED = {"rollout/groups_without_signal": 1.0, "reward/invalid": 0.0}
WARMED_UP = replace(SETUP, stages=("sft", "rl"), keys={"sft.epochs": 12}, prompts_per_step=16)
SIGNALS = [
    (0.0, 0.0, SETUP, "all wrong"),
    (0.0, 0.0, WARMED_UP, "all wrong after [sft]"),
    (0.0, 0.0, replace(SETUP, keys={"model.name": "tiny"}), "all wrong with random weights"),
    (1.0, 0.0, SETUP, "all right, and held-out ones are not known"),
    (0.4, 0.0, SETUP, "every answer gets the same"),
    (0.5, 0.5, SETUP, "each prompt is always right or always wrong"),
]


COLD = ("all wrong", "all wrong with random weights")


@pytest.mark.parametrize(("mean", "spread", "setup", "case"), SIGNALS)
def test_no_signal_names_the_case_that_holds(
    mean: float, spread: float, setup: Background, case: str
) -> None:
    """And its remedy alone; what is in the recipe already is not proposed."""
    record = {**AGREED, "reward/std": spread, "reward/mean": mean, "reward/part/exact": mean}
    (finding,) = run([record] * 6, setup)
    assert finding.text == (
        f"nothing to learn from: 100% of groups agree: {case} (exact {mean:.2f})"
    )
    assert finding.remedy == RULES["no_signal"].remedies[case]
    assert ("with `[sft]`" in finding.remedy) == (case in COLD)
    assert finding.change == ("--sft.epochs 24" if setup is WARMED_UP else "")


@pytest.mark.parametrize(
    ("held_out", "case"),
    [(1.0, "all right"), (0.48, "all right on train prompts, and not on held-out ones")],
)
def test_all_right_is_a_reason_to_stop_only_where_held_out_problems_are(
    held_out: float, case: str
) -> None:
    """The evaluation before the first step counts, where training was then what it is now."""
    known = {"eval/part/exact": held_out, "eval/problems": 56.0}
    diagnosis = Diagnosis(WARMED_UP, before=known)
    record = {**AGREED, "reward/std": 0.0, "reward/mean": 1.0, "reward/part/exact": 1.0}
    for step in range(1, 7):
        diagnosis.feed(step, record)
    found = {finding.rule: finding for finding in diagnosis.findings}
    assert case in found["no_signal"].text
    assert ("stop" in found["no_signal"].remedy) == (held_out == 1.0)
    assert ("memorised" in found) == (held_out == 0.48)
    assert found["no_signal"].change == ("" if held_out == 1.0 else "--sft.epochs 4")


OUT_OF_TEN = replace(SETUP, full={"exact": 10.0, "format": 1.0}, prompts_per_step=16)
MARKS = [
    (0.0, OUT_OF_TEN, "all wrong (exact 0.00 of 10)"),
    (1.0, OUT_OF_TEN, "every answer gets the same (exact 1.00 of 10)"),
    (10.0, OUT_OF_TEN, "all right (exact 10.00 of 10)"),
    (10.0, replace(SETUP, full={"exact": 1.0}), "every answer gets the same (exact 10.00)"),
]


@pytest.mark.parametrize(("mean", "setup", "said"), MARKS)
def test_a_reward_is_judged_by_its_full_marks(mean: float, setup: Background, said: str) -> None:
    """1 out of 10 is nearly nothing; and what declares no maximum and gives 10 is not known."""
    record = {**AGREED, "reward/std": 0.0, "reward/mean": mean, "reward/part/exact": mean}
    diagnosis = Diagnosis(setup, before={"eval/part/exact": mean, "eval/problems": 56.0})
    for step in range(1, 7):
        diagnosis.feed(step, record)
    (finding,) = diagnosis.findings
    assert finding.text == f"nothing to learn from: 100% of groups agree: {said}"
    assert ("stop" in finding.remedy) == said.startswith("all right")


def test_train_and_held_out_are_compared_in_full_marks() -> None:
    """Else 9.8 of 10 is beyond full marks, and a rise of 0.4 out of 10 is taken for one of 40 %."""
    tens = [{name: 10 * value for name, value in row.items()} for row in ILL["memorised"]]
    (finding,) = run(tens, replace(HELD_OUT, full={"exact": 10.0}))
    assert finding.rule == "memorised"
    said = "exact is 9.82 of 10 on the train prompts and 4.80 of 10 on 50 held-out ones"
    assert finding.text == said
    flat = course(
        **part("exact", ramp(0.2, 0.6, spread=0.1)),
        **part("format", [*ramp(0.1, 0.95, 15), *level(0.95, 25)]),
    )
    (finding,) = run(flat, OUT_OF_TEN)
    assert finding.rule == "format_learned_accuracy_flat"
    assert finding.text.endswith("while exact stays at 0.46 of 10")


def test_with_dynamic_sampling_held_out_problems_are_asked() -> None:
    """The training reward says the same in every one of these."""
    setup = replace(HELD_OUT, stages=("rl",), keys=DYNAMIC)
    kept = {"reward__mean": level(0.5, 210, spread=0.1), "reward__std": level(0.4, 210)}
    exact, held_out = part("exact", level(0.5, 210)), "eval/part/exact"
    (finding,) = run(course(**kept, **exact, **{"eval/accuracy": level(0.22, 210)}), setup)
    assert finding.text == "in 200 steps held-out accuracy went from 22.0% to 22.0% of 50 problems"
    never = {"eval/accuracy": level(0.0, 210), held_out: level(0.0, 210)}
    (finding,) = run(course(**kept, **exact, **never), setup)
    assert finding.remedy == RULES["nothing_learned"].remedies["never right"]
    form = part("format", [*ramp(0.1, 0.95, 15), *level(0.95, 195)])
    found = run(course(**kept, **exact, **form, **{held_out: level(0.02, 210)}), setup)
    assert [finding.rule for finding in found] == ["format_learned_accuracy_flat"]
    assert found[0].text.endswith("while exact stays at 0.02")
    truth = {"eval/part/watched": ramp(0.6, 0.1, 210), "eval/reward": ramp(0.2, 0.9, 210)}
    found = run(course(**kept, **truth), setup)
    assert [finding.rule for finding in found] == ["hacking"]
    assert found[0].text.startswith("the held-out reward rose from 0.20 to ")
    assert "while held-out watched fell from 0.60 to " in found[0].text


def test_without_a_judge_only_equal_rewards_are_spoken_of() -> None:
    """A constant reward of 1 need not be full marks; one of 0 is nothing in any scale."""
    for mean, case in ((1.0, "every answer gets the same"), (0.0, "all wrong")):
        (alone,) = run([{"reward/std": 0.0, "reward/mean": mean}] * 6, Background())
        assert alone.text == (
            f"nothing to learn from: all rewards are equal: {case} (reward {mean:.2f})"
        )


def test_answers_that_are_cut_and_earn_more_and_more_are_no_finding() -> None:
    """A reward may ask for as many tokens as there may be."""
    rewards = [0.07, 0.12, 0.13, 0.17, 0.25, 0.29, 0.29, 0.38, 0.42, 0.48, 0.54, 0.59]
    cut = {"rollout/truncated": 1.0, "reward/std": 0.1}
    assert run([{**cut, "reward/mean": reward} for reward in rewards]) == []
    (finding,) = run([{**cut, "reward/mean": 0.1 + 0.01 * (n % 3)} for n in range(12)])
    assert finding.rule == "all_truncated"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_stage_is_judged_at_its_end(steps: int) -> None:
    """What held in all of its steps, however few; not what held in some."""
    ill = {**AGREED, "reward/std": 0.0, "reward/mean": 0.0, "rollout/truncated": 1.0}
    assert run([ill] * steps) == []
    found = finished([ill] * steps)
    assert [(finding.rule, finding.step) for finding in found] == [
        ("no_signal", steps),
        ("all_truncated", steps),
    ]
    well = {**ill, "rollout/groups_without_signal": 0.5, "rollout/truncated": 0.1}
    assert finished([ill] * steps + [well]) == []
    assert [finding.rule for finding in finished([{**ill, "reward/invalid": 1.0}] * steps)] == [
        "all_truncated",
        "grader_failing",
    ]


UNMOVED = {
    "never right": course(
        reward__mean=level(0.2, 30, spread=0.1), **{"reward/part/exact": [0] * 30}
    ),
    "all was right before": course(
        reward__mean=level(0.97, 30, spread=0.01), **{"reward/part/exact": level(0.97, 30)}
    ),
    "the policy hardly moved": course(
        reward__mean=level(0.3, 30, spread=0.1),
        objective__kl=level(1e-3, 30),
        **{"reward/part/exact": level(0.3, 30)},
    ),
    "it moved, and not towards the reward": course(
        reward__mean=level(0.3, 30, spread=0.1),
        objective__kl=ramp(0.0, 2.0, 30),
        **{"reward/part/exact": level(0.3, 30)},
    ),
    "it fell": course(
        reward__mean=ramp(0.5, 0.2, 30, spread=0.05), **{"reward/part/exact": level(0.3, 30)}
    ),
}


@pytest.mark.parametrize("case", UNMOVED)
def test_nothing_learned_is_said_at_the_end_with_its_likeliest_reason(case: str) -> None:
    (finding,) = finished(UNMOVED[case], replace(SETUP, stages=("rl",)))
    assert finding.rule == "nothing_learned"
    assert finding.remedy == RULES["nothing_learned"].remedies[case]
    assert "(first and last 6 steps; chance explains ±" in finding.text  # the summary has others
    assert run(UNMOVED[case]) == []  # thirty steps are no reason to say so on the way
    assert finished(UNMOVED[case], replace(SETUP, stages=("rl", "eval"))) == []  # eval will say it


def test_nothing_learned_is_weighed_with_what_is_held_out() -> None:
    """0 of 56 before and after; 1 of 56 is luck; 12 of 56 is not."""
    records = course(reward__mean=level(0.24, 30, spread=0.1))
    for after, learned in ((0.0, False), (1 / 56, False), (12 / 56, True)):
        setup = replace(HELD_OUT, stage="eval", stages=("sft", "rl", "eval"))
        diagnosis = Diagnosis(setup, before={"eval/accuracy": 0.0, "eval/problems": 56.0})
        for step, record in enumerate(records, start=1):
            diagnosis.add_to_history(step, record)
        found = diagnosis.finish({"eval/accuracy": after, "eval/problems": 56.0})
        assert [finding.rule for finding in found] == ([] if learned else ["nothing_learned"])
    assert "held-out accuracy from 0.0% to" in finished_text(records, before=0.0, after=0.0)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_what_has_clearly_fallen_is_said_after_any_number_of_steps(steps: int) -> None:
    """9 of 150 before and none after is no chance; 6 after is. Else a short run is silent."""
    records = course(reward__mean=level(0.1, 20, spread=0.1))[:steps]
    setup = replace(HELD_OUT, stage="eval", stages=("rl", "eval"), num_eval_problems=150)
    for after, fell in ((0.0, True), (6 / 150, False)):
        diagnosis = Diagnosis(setup, before={"eval/accuracy": 0.06, "eval/problems": 150.0})
        for step, record in enumerate(records, start=1):
            diagnosis.add_to_history(step, record)
        found = diagnosis.finish({"eval/accuracy": after, "eval/problems": 150.0})
        assert [finding.rule for finding in found] == ["nothing_learned"] * fell
    assert diagnosis.findings == []
    text = finished_text(records, before=0.5, after=0.1)
    assert text.startswith(f"in {steps} step{'s' * (steps > 1)} ")
    assert "held-out accuracy" in text
    assert "inf" not in text
    assert "from 50.0% to 10.0% of 56 problems" in text


def finished_text(records: Records, *, before: float, after: float) -> str:
    setup = replace(HELD_OUT, stage="eval")
    diagnosis = Diagnosis(setup, before={"eval/accuracy": before, "eval/problems": 56.0})
    for step, record in enumerate(records, start=1):
        diagnosis.add_to_history(step, record)
    (finding,) = diagnosis.finish({"eval/accuracy": after, "eval/problems": 56.0})
    return finding.text


def test_memorised_says_who_did_it() -> None:
    """Known before the first step of rl, it was sft; learned in rl, it was rl."""
    held_out = {"eval/part/exact": level(0.48, 40)}
    slow = course(reward__mean=level(0.9, 40), **part("exact", ramp(0.5, 1.0)), **held_out)
    (finding,) = run(slow, SETUPS["memorised"])
    assert finding.remedy == RULES["memorised"].remedies["in rl"]
    (finding,) = run(ILL["memorised"], SETUPS["memorised"])
    assert finding.remedy == RULES["memorised"].remedies["by [sft], on the prompts of rl"]
    assert finding.text == "exact is 0.98 on the train prompts and 0.48 on 50 held-out ones"
    assert finding.change == "--sft.epochs 9"
    (finding,) = run(ILL["memorised"], HELD_OUT)
    assert finding.remedy == RULES["memorised"].remedies["by [sft]"]


def test_sft_that_memorises_is_told_its_best_epoch() -> None:
    """The held-out loss of the history is lowest at its tenth look, in the fourth epoch of 3."""
    (finding,) = run(ILL["sft_memorises"], SETUPS["sft_memorises"])
    assert finding.change == "--sft.epochs 4"
    assert "was 1.168 in epoch 4 (step 10)" in finding.text


def test_the_last_word_of_a_finding_is_of_the_end() -> None:
    """Not of the step where it began; and where the end contradicts it, it is over."""
    for last, until in ((2.722, None), (1.0, 24)):
        diagnosis = Diagnosis(SETUPS["sft_memorises"])
        held_out = [*(row["test/loss"] for row in ILL["sft_memorises"]), 2.5, 2.6, 2.7, last]
        train = [*(row["loss/total"] for row in ILL["sft_memorises"]), *level(0.09, 4)]
        for step, record in enumerate(course(loss__total=train, test__loss=held_out), start=1):
            diagnosis.feed(step, record)
        assert "is 1.358 now" not in diagnosis.findings[0].text
        assert "is 2.722 now" not in diagnosis.findings[0].text
        diagnosis.finish()
        (finding,) = diagnosis.findings
        assert finding.until == until
        assert ("and is 2.722 now" in finding.text) == (until is None)


def test_what_did_not_hold_at_the_very_end_says_when_it_last_did() -> None:
    diagnosis = Diagnosis()
    for step in range(1, 16):
        diagnosis.feed(step, {"rollout/truncated": float(step <= 10)})
    diagnosis.finish()
    (finding,) = diagnosis.findings
    assert (finding.step, finding.until) == (5, None)
    assert finding.text == "100% of the completions are cut by the length limit (at step 11)"


def test_an_engine_that_never_takes_new_weights_is_told_from_one_that_rounds() -> None:
    """Its first step agrees to the last bit, each later one less, far below rounding."""
    loose = replace(SETUP, rounding=0.05)
    stale = course(mismatch__mean=[1e-7, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3])
    (finding,) = run(stale, loose)
    said = "engine and trainer disagree by 0.004 nats a token, from 1e-07 in the first step"
    assert finding.text == said
    assert finding.remedy == RULES["drift"].remedies["it grows"]
    (finding,) = run(course(mismatch__mean=level(0.2, spread=0.01)), loose)
    assert finding.remedy == RULES["drift"].remedies["from the first step on"]
    assert run(course(mismatch__mean=ramp(5e-3, 1.6e-2, spread=1e-3)), loose) == []


def test_broken_graders_are_not_called_agreement() -> None:
    broken = {"rollout/groups_without_signal": 1.0, "reward/std": 0.0, "reward/invalid": 1.0}
    assert [finding.rule for finding in run([broken] * 8)] == ["grader_failing"]


@pytest.mark.parametrize(
    ("tokens", "environment", "said"), [(1, True, 0), (1, False, 1), (2, True, 1)]
)
def test_a_move_of_one_token_is_not_cut(tokens: int, environment: bool, said: int) -> None:
    """In a game every token is a turn; an answer of one token to a question is a fragment."""
    setup = Background(environment=environment, keys={"rl.max_new_tokens": tokens})
    diagnosis = Diagnosis(setup)
    for step in range(1, 11):
        diagnosis.feed(step, {"rollout/truncated": 1.0})
    assert len(diagnosis.findings) == said


def test_broken_environments_are_not_called_a_broken_grader() -> None:
    """What could only not be closed broke no episode."""
    broken = {"reward/invalid": 0.2, "env/errors/close": 3.0}
    (finding,) = run([broken | {"env/errors/timeout": 1.0, "env/errors/raised": 2.0}] * 8)
    assert finding.text == "20.0% of the episodes are invalid: environments broke (raised, timeout)"
    assert finding.remedy == RULES["grader_failing"].remedies["environments"]
    (finding,) = run([broken] * 8)
    assert finding.text == "the grader broke on 20.0% of the completions"


@pytest.mark.parametrize(
    ("mean", "setup", "case"),
    [
        (0.0, SETUP, "every episode scores 0"),
        (0.0, WARMED_UP, "every episode scores 0 after [sft]"),
        (-0.5, SETUP, "every episode gets the same"),
        (1.0, SETUP, "all right, and held-out ones are not known"),
    ],
)
def test_where_an_environment_scores_the_task_is_no_judge(
    mean: float, setup: Background, case: str
) -> None:
    own = {"reward/part/env": mean, "reward/part/exact": 0.02, "reward/part/format": 1.0}
    record = {**AGREED, **own, "reward/std": 0.0, "reward/mean": mean}
    (finding,) = run([record] * 6, setup)
    assert finding.text == (
        f"nothing to learn from: 100% of groups agree: {case} (the environment's score {mean:.2f})"
    )
    assert finding.remedy == RULES["no_signal"].remedies[case]
    assert not re.search(r"the reward|\[rewards\]", finding.remedy)


def test_an_environment_that_is_learned_is_no_hacking() -> None:
    """The task's accuracy falls, and what it watches too, while the environment's score rises."""
    records = course(
        reward__mean=ramp(0.1, 0.7),
        reward__part__env=ramp(0.1, 0.7),
        reward__part__watched=ramp(0.9, 0.1),
        eval__accuracy=ramp(0.9, 0.1),
    )
    assert run(records, SETUP) == []
    task = [{k: v for k, v in record.items() if k != "reward/part/env"} for record in records]
    assert "hacking" in [finding.rule for finding in run(task, SETUP)]


def test_hacking_is_seen_in_the_held_out_accuracy() -> None:
    """Two evaluations below the best one, while the reward rises; one alone is luck."""

    def points(*accuracies: float) -> list[dict[str, float]]:
        steps = course(reward__mean=ramp(0.2, 0.9, spread=0.02))
        return [
            {**record, "eval/accuracy": accuracies[at // 8]} if at % 8 == 7 else record
            for at, record in enumerate(steps)
        ]

    (finding,) = run([{"eval/accuracy": 0.5}, *points(0.6, 0.7, 0.5, 0.4, 0.3)])
    assert finding.rule == "hacking"
    assert finding.text.endswith("while held-out accuracy fell from 0.70 to 0.50")
    assert run([{"eval/accuracy": 0.5}, *points(0.6, 0.7, 0.5, 0.7, 0.6)]) == []


@pytest.mark.parametrize("table", ["exact", "my.rewards:exact"])
def test_an_answer_that_nothing_is_learned_from_is_given_a_weight(table: str) -> None:
    """To lower the weight of the one reward that is learned, or to sample more, is no remedy."""
    keys = {f"rewards.{table}.weight": 0.0, "rewards.format.weight": 1.0}
    setup = replace(SETUP, weights={"exact": 0.0, "format": 1.0}, keys=keys)
    (finding,) = run(ILL["format_learned_accuracy_flat"], setup)
    assert finding.remedy.startswith("Nothing that is learned from depends on the answer")
    assert finding.text.endswith("which has weight 0 in [rewards]: give exact a weight")
    assert finding.change == f"--rewards.{table}.weight 1.0"
    alone = replace(setup, keys={"rewards.format.weight": 1.0})  # the task brings it
    (finding,) = run(ILL["format_learned_accuracy_flat"], alone)
    assert finding.change == ""
    (finding,) = run(ILL["format_learned_accuracy_flat"], replace(SETUP, keys=keys))
    assert finding.change == "--rewards.format.weight 0.5"


MONITORED = replace(
    SETUP,
    decides="numeric",
    weights={"form": 1.0, "numeric": 0.0},
    keys={"rl.steps": 20, "rl.group_size": 4, "rewards.form.weight": 1.0},
)


@pytest.mark.parametrize(
    ("mean", "case"), [(1.0, "every answer gets the same"), (0.0, "all wrong")]
)
def test_the_signal_is_that_of_the_rewards_that_are_learned_from(mean: float, case: str) -> None:
    """Not that of the check of answers which the task adds with weight 0."""
    record = {**AGREED, "reward/std": 0.0, "reward/mean": mean}
    record |= {"reward/part/form": mean, "eval/part/form": mean, "reward/part/numeric": 0.0}
    (finding,) = run([record] * 6, MONITORED)
    said = f"nothing to learn from: 100% of groups agree: {case} (reward {mean:.2f})"
    assert finding.text == said
    assert finding.remedy == RULES["no_signal"].remedies[case]


def test_a_run_without_progress_is_not_judged_by_what_is_only_monitored() -> None:
    """Easier prompts are no remedy where nobody learns from the answers."""
    setup = replace(MONITORED, stages=("rl",))
    form = level(0.3, 30, spread=0.1)
    flat = course(reward__mean=form, **part("form", form), **part("numeric", level(0.0, 30)))
    (finding,) = finished(flat, setup)
    assert (
        finding.remedy == RULES["nothing_learned"].remedies["it moved, and not towards the reward"]
    )


def test_hacking_names_what_is_learned_from_and_what_is_only_monitored() -> None:
    """Fewer steps of a reward that does not look at the answer are no remedy."""
    records = course(
        reward__mean=[row["reward/mean"] for row in HACKED],
        **part("form", [row["reward/mean"] for row in HACKED]),
        **part("numeric", [row["reward/part/watched"] for row in HACKED]),
    )
    (finding,) = run(records, MONITORED)
    assert finding.rule == "hacking"
    assert "of form rose from 0.06 to " in finding.text
    assert finding.text.endswith("while numeric, which is only monitored, fell from 0.96 to 0.08")
    assert finding.change == ""
    assert finding.remedy == RULES["hacking"].remedies["what decides has weight 0"]
    named = replace(MONITORED, keys={"rewards.numeric.weight": 0.0})
    assert run(records, named)[0].change == "--rewards.numeric.weight 1.0"
    accuracy = [
        {"reward/mean": row["reward/mean"], "eval/accuracy": row["reward/part/watched"]}
        for row in HACKED
    ]
    (finding,) = run(accuracy, MONITORED)
    assert "while held-out accuracy by numeric, which is only monitored, fell" in finding.text


HACKED = course(
    reward__mean=[0.056, 0.1, 0.3, 0.7, 0.9, 0.97, *level(0.99, 14, spread=0.005)],
    **part("watched", [0.96, 0.95, 0.7, 0.3, 0.1, 0.02, *level(0.0, 14)]),
)


def test_hacking_within_the_first_steps_is_seen_on_the_way() -> None:
    """Blocks that hold the fall itself are wide: they would take it for noise until step 30."""
    (finding,) = run(HACKED)
    assert (finding.rule, finding.step, finding.until) == ("hacking", 8, None)
    assert finding.text.startswith("the training reward (first step and last 5) rose from 0.06")
    assert finding.text.endswith("while watched fell from 0.96 to 0.08; watched fell after step 2")
    assert finding.change == "--rl.steps 2"
    quick = [HACKED[0], *HACKED[3:]]  # one good step alone might be luck: held-out problems say no
    diagnosis = Diagnosis(SETUP, before={"eval/part/watched": 0.96})
    for step, record in enumerate(quick, start=1):
        diagnosis.feed(step, record)
    diagnosis.finish()
    assert [(row.rule, row.step, row.until) for row in diagnosis.findings] == [("hacking", 7, None)]
    assert "(at step" not in diagnosis.findings[0].text


@pytest.mark.parametrize(("after", "seen"), [(0.0, True), (0.94, False)])
@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/part/watched"])
def test_hacking_is_seen_at_the_end_of_a_short_run(metric: str, after: float, seen: bool) -> None:
    """Held-out problems before and after, where no evaluation lies between; 0.94 is chance."""
    setup = replace(HELD_OUT, stage="eval", keys={"rl.steps": 20})
    diagnosis = Diagnosis(setup, before={metric: 0.962, "eval/problems": 52.0})
    for step, record in enumerate(course(reward__mean=ramp(0.056, 0.995, 20)), start=1):
        diagnosis.add_to_history(step, record)
    found = diagnosis.finish({metric: after, "eval/problems": 52.0})
    assert [finding.rule for finding in found] == (["hacking"] if seen else [])
    if seen:
        assert "fell from 96.2% to 0.0% of 52 problems" in found[0].text
        assert "(first and last 2 steps) rose from 0.08 to 0.97" in found[0].text
        assert found[0].change == "--rl.steps 10"


def test_what_train_prompts_teach_by_heart_is_not_called_hacking() -> None:
    setup = replace(HELD_OUT, stage="eval")
    known = {"eval/accuracy": 0.9, "eval/part/exact": 0.9, "eval/problems": 52.0}
    diagnosis = Diagnosis(setup, before=known)
    records = course(reward__mean=ramp(0.5, 1.0, 20), **part("exact", ramp(0.8, 1.0, 20)))
    for step, record in enumerate(records, start=1):
        diagnosis.add_to_history(step, record)
    found = diagnosis.finish(dict.fromkeys(known, 0.4) | {"eval/problems": 52.0})
    assert [finding.rule for finding in found] == ["memorised"]


def test_what_is_cut_on_purpose_is_no_drift() -> None:
    cut = Background(rounding=float("inf"))
    assert run(course(mismatch__mean=ramp(0.01, 3.0)), cut) == []


def test_a_drift_is_seen_before_it_is_large() -> None:
    (finding,) = run(course(mismatch__mean=ramp(1e-5, 8e-4)))
    assert finding.rule == "drift"


METRICS = sorted({metric for records in ILL.values() for metric in records[0]} | {"eval/accuracy"})
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=16)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), VALUES), max_size=40))
def test_no_history_breaks_a_rule(records: list[dict[str, float]]) -> None:
    run(records)
    run([record for record in records for _ in range(6)], Background())


def test_a_long_run_forgets_its_middle_and_keeps_its_start() -> None:
    diagnosis = Diagnosis(SETUP)
    for step in range(1, 3001):
        diagnosis.feed(step, {"objective/entropy": 0.8 if step < 2990 else 0.02})
    assert len(diagnosis._history) == 500
    assert [finding.step for finding in diagnosis.findings] == [2993]


def test_findings_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    """One line when it begins, one more when it is over; a torn one is left out."""
    tracker = JsonlTracker(Stage(name="rl", folder=tmp_path, total_steps=30))
    diagnosing = Diagnosing(tracker, tmp_path)
    for step in range(1, 31):
        diagnosing.log(step, {"rollout/truncated": float(step <= 10)})
    diagnosing.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 30
    path = tmp_path / "diagnosis.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["finding"], line["until"]) for line in lines] == [
        (5, "all_truncated", None),
        (5, "all_truncated", 21),
    ]
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert read_findings(path) == lines[1:]
    assert read_findings(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", [0, 4, 5, 12, 25])
def test_findings_go_on_where_a_run_does(tmp_path: Path, cut: int) -> None:
    """The file of a run that was cut back and goes on is that of one that was not, to the byte."""
    records = [
        {"step": step, "rollout/truncated": float(step <= 10 or step > 40)} for step in range(1, 51)
    ]

    def log(diagnosing: Diagnosing, rows: list[dict[str, float]]) -> None:
        for row in rows:
            diagnosing.log(int(row["step"]), {"rollout/truncated": row["rollout/truncated"]})

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    log(Diagnosing(Several([]), tmp_path / "whole"), records)
    log(Diagnosing(Several([]), tmp_path / "cut"), records[:30])  # more than its checkpoint saw
    told: list[str] = []
    again = Diagnosing(Several([]), tmp_path / "cut", tell=[told.append])
    again.replay(records[:cut])
    assert told == []
    log(again, records[cut:])
    files = [tmp_path / name / "diagnosis.jsonl" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_bytes().splitlines()) == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_a_finding_and_goes_on(terminal: bool, tmp_path: Path) -> None:
    """Below the panel, or on a line of its own between those of the steps."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, _environ={})
    stage = Stage(name="rl", folder=tmp_path, total_steps=8)
    shown = ConsoleTracker(stage, console=console, every_steps=4)
    diagnosing = Diagnosing(shown, tmp_path, tell=[shown.note])
    for step in range(1, 9):
        diagnosing.log(step, {"reward/mean": 0.5, "rollout/truncated": 1.0})
    shown.note("[bold]\x1b[2J")  # nothing in a remark acts on a terminal
    diagnosing.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    said = "! step 5: 100% of the completions are cut by the length limit. Raise rl.max_new_tokens"
    if terminal:
        panel, below = text.rpartition("╭")[2].split("╯")
        assert "step 8/8" in panel
        assert below.strip().startswith(said)
        return
    assert text.count(said) == 1
    starts = [line.split("  ")[0] for line in text.splitlines()]
    assert starts[:2] == ["rl 1/8", "rl 4/8"]
    assert starts[2].startswith(said)
    assert starts[3] == "rl 8/8"
    assert starts[4] == "! [bold]\\x1b[2J"


def test_many_remarks_do_not_outgrow_the_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, _environ={})
    shown = ConsoleTracker(Stage(name="rl", folder=tmp_path, total_steps=8), console=console)
    for number in range(9):
        shown.note(f"remark {number}")
    shown.close()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rpartition("╯")[2]
    assert re.findall(r"remark \d", last) == [f"remark {number}" for number in range(5, 9)]


def test_remedies_have_their_keys_as_code_but_for_a_terminal() -> None:
    """The page formats what stands in backticks; a terminal shows the keys alone."""
    for rule in RULES.values():
        for text in rule.remedies.values():
            plain = "".join(text.split("`")[::2])
            assert text.count("`") % 2 == 0
            assert not re.search(r"\b(?:rl|sft|run|environment)\.\w|rollout/|\[\w+\]", plain), text
    finding = Finding(rule="drift", step=1, text="far", remedy='Set `rl.engine = "native"`.')
    assert str(finding) == 'step 1: far. Set rl.engine = "native".'


def test_remedies_name_keys_that_exist() -> None:
    said = [text for rule in RULES.values() for text in rule.remedies.values()]
    for key in re.findall(r"\b(?:rl|sft|run)\.[a-z_.]*[a-z]", " ".join(said)):
        assert find_field(key.split("."))[0] == key


def test_every_rule_reads_metrics_that_are_explained() -> None:
    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    own = ("reward/part/", "eval/part/", "verdict/")  # by the rewards' names; from verdict.json
    plain = [name for name in METRICS if not name.startswith(own)]
    assert [name for name in plain if f"| `{name}` |" not in explained] == []
