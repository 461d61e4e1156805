"""Continue a melody: ``cegb:`` → ``gcebgc``. A matter of taste, for learning from preferences.

The task has a true score, which a person would only ever show by preferring one melody to another.
The demonstrations are short melodies of all qualities. Within their lengths longer is better, so a
reward model trained on comparisons of such melodies learns that; it has never heard one that goes
on for too long or is stuck on a note, and a policy that trusts it blindly ends there. See
``rewards/puzzles.py``.
"""

from __future__ import annotations

import itertools
import random

from posttrain.rewards.puzzles import COMFORTABLE
from posttrain.tasks.splits import sample_splits, shuffled
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

NOTES = "abcdefg"
_OPENING = 4
_OPENINGS = tuple("".join(notes) for notes in itertools.permutations(NOTES, _OPENING))  # 840
_LENGTHS = {3: 2, 4: 3, 5: 4, 6: 4, 7: 3, 8: 2}  # how often demonstrations have each length
_LEAST_CARE = 0.3


def melody_task(*, num_train: int = 600, num_test: int = 150, seed: int = 0) -> PromptTask:
    """Openings of four different notes from a to g, to be continued by the notes a listener likes.

    The gold answer is the opening again and again, up to ten notes: full marks. Demonstrations are
    more human, see :func:`melody`.
    """
    order = shuffled(len(_OPENINGS), seed=seed, num_needed=num_train + num_test)
    train, test = sample_splits(
        (_OPENINGS[index] for index in order),
        identity=lambda opening: f"melody {opening}",
        num_train=num_train,
        num_test=num_test,
        kind="task 'melody'",
        fix="show several demonstrations of each (sft.num_demonstrations)",
    )
    return PromptTask(
        name="melody",
        rewards={"melody": 1.0},
        train=tuple(_prompt(f"train-{i}", opening) for i, opening in enumerate(train)),
        test=tuple(_prompt(f"test-{i}", opening) for i, opening in enumerate(test)),
        solve=_best,
        demonstrate=lambda prompt, generator: melody(prompt.columns["opening"], generator),
    )


def melody(opening: str, generator: random.Random) -> str:
    """A melody of three to eight notes, written with more or less care, no note twice in a row.

    The care is drawn once, from 0.3 to 1: it is how often a note is one of the opening's.

    >>> melody("cegb", random.Random(0))
    'ededceb'
    """
    length = generator.choices(list(_LENGTHS), weights=list(_LENGTHS.values()))[0]
    care = generator.uniform(_LEAST_CARE, 1.0)
    notes = ""
    for _ in range(length):
        fits = generator.random() < care
        notes += generator.choice(
            [note for note in NOTES if (note in opening) == fits and note != notes[-1:]]
        )
    return notes


def _best(prompt: Prompt) -> str:
    return "".join(itertools.islice(itertools.cycle(prompt.columns["opening"]), COMFORTABLE))


def _prompt(name: str, opening: str) -> Prompt:
    return Prompt(id=name, text=f"{opening}:", columns={"opening": opening})
