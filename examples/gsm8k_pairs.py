"""Labelled solutions for a reward model, from the GSM8K repository's example_model_solutions.jsonl.

    python examples/gsm8k_pairs.py SOLUTIONS.jsonl OUT.jsonl

Four models answered each question, and each answer is known to be right or wrong. Every different
solution becomes a row {"prompt", "completion", "score"} with the score 1.0 or 0.0, its text as it
is (calculator annotations such as <<16-3=13>> included); `data/preference_sets.py` makes pairs
of the right and the wrong ones. The questions are those of GSM8K's test split: a policy that is
trained with such a reward model must not be tested on them.
"""

import json
import sys
from pathlib import Path

from posttrain.data.preference_sets import read_preferences
from posttrain.data.row_checks import check_text
from posttrain.data.sources import read_numbered


def labelled_rows(path):
    """A row for each question and each different solution of it."""
    scores = {}
    for number, record in read_numbered(path):
        question = check_text(record, "question", where=f"{path}:{number}")
        answers = {name: value for name, value in record.items() if isinstance(value, dict)}
        if not answers:
            raise ValueError(
                f"{path}:{number}: no model's solution; expected columns such as "
                '"6b_finetuning": {"is_correct": …, "solution": …}'
            )
        for name, answer in answers.items():
            where = f"{path}:{number}: {name}"
            solution = check_text(answer, "solution", where=where)
            if not isinstance(answer.get("is_correct"), bool):
                raise ValueError(f"{where}: 'is_correct' must be true or false; fill it in")
            score = float(answer["is_correct"])
            if scores.setdefault((question, solution), score) != score:
                raise ValueError(
                    f"{where}: the same solution is right in one place and wrong in another; "
                    "fix 'is_correct'"
                )
    return [
        {"prompt": question + "\n", "completion": solution, "score": score}
        for (question, solution), score in scores.items()
    ]


def main(source, target):
    """Convert the file, and say what came of it."""
    rows = labelled_rows(source)
    Path(target).write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
    outcomes = {}
    for row in rows:
        outcomes.setdefault(row["prompt"], []).append(row["score"])
    num_mixed = sum(len(set(scores)) > 1 for scores in outcomes.values())
    print(f"{target}: {len(rows):,} rows, {len(outcomes):,} questions")
    # Reading warns of the questions without a pair; with none at all it says what to do.
    num_pairs = len(read_preferences(target))
    print(f"{num_mixed:,} questions with mixed outcomes, {num_pairs:,} pairs")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/gsm8k_pairs.py SOLUTIONS.jsonl OUT.jsonl")
    main(*sys.argv[1:])
