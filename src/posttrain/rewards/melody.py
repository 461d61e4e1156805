"""How much does a listener like a melody? A score that its judges never state, only act upon."""

from __future__ import annotations

COMFORTABLE = 10
PRICE_OF_EXTRA = 2


def melody_score(completion: str, opening: str) -> float:
    """What a listener thinks of the melody that follows an opening: from −1 to 1.

    Of the first ten notes, each that also stands in the opening counts +1 and each other one −1, as
    does a note that repeats the one before it; every note after the tenth costs 2, whichever it is;
    the sum is divided by ten, and is never less than −1. Every character is a note, so text that is
    no melody is a row of wrong notes.

    Up to ten notes, longer melodies of the same care are better; then the score falls steeply. Who
    only ever heard short melodies that move learns the first, and nothing of the rest.

    >>> melody_score("cegb", "cegb"), melody_score("cegbcegbce", "cegb")
    (0.4, 1.0)
    >>> melody_score("cad", "cegb"), melody_score("cegb" * 4, "cegb")  # 1 − 2; 10 − 2 · 6
    (-0.1, -0.2)
    >>> melody_score("cccc", "cegb")  # stuck: 1 − 3
    -0.2
    """
    if not opening:
        raise ValueError("opening: empty; give the column the notes that the prompt shows")
    heard = completion[:COMFORTABLE]
    num_liked = sum(
        note in opening and note != before for before, note in zip(" " + heard, heard, strict=False)
    )
    num_extra = len(completion) - len(heard)
    points = num_liked - (len(heard) - num_liked) - PRICE_OF_EXTRA * num_extra
    return max(-1.0, points / COMFORTABLE)
