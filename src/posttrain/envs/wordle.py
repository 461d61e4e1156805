"""Wordle: guess a word of five letters; after each guess the letters are judged."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass

from posttrain.protocols import Answer
from posttrain.types import Observation, Prompt, Score, Turn

LENGTH = 5
WORDS = """
about above actor adult agent alarm album apple beach begin black blame blind board brain bread
break brick brown build cabin cable candy carry cause chain chair chalk cheap chest child clean
clear clock cloud coach coast could count cover crane cream crowd dance depth dough draft dream
dress drink drive eagle early earth empty enjoy equal error event exact fault field fight final
first flame floor flour focus force fresh front frost fruit ghost glass globe grade grain grand
grape grass green group guess habit happy heart heavy hotel house human image index joint judge
juice knife laugh layer learn lemon level light limit lucky lunch magic major maple march metal
minor model money month motor mouse mouth music night noise north novel nurse ocean offer olive
onion order other owner paint panel paper party peace phone photo piano pilot place plain plane
plant plate point pound power press price pride prize proof queen quick quiet radio raise range
rapid reach ready right river robot rough round route royal salad scale score sense serve shade
shape share sharp sheep sheet shelf shine shirt shore short sight skill sleep slice small smart
smile smoke snake solid sound south space speak speed spoon sport staff stage stair start state
steam steel stone storm story sugar sweet table taste teach thank theme thick think tiger title
toast today total touch tower track trade train treat trend trial truck trust truth uncle under
union upper urban value video visit voice waste watch water wheel white whole woman world worth
""".split()  # noqa: SIM905 - a list that can be read
RULES = (
    "Guess a secret word of five letters in {guesses} guesses. After each guess every letter is "
    "judged: G is right and in its place, Y is in the word at another place, X is not in the word. "
    "Write one word as <guess>WORD</guess>."
)
_TAG = re.compile("</?guess>")
_TAGGED = re.compile("<guess>([^<]*)</guess>")
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{5}(?![A-Za-z])")


@dataclass
class Guessed:
    """One game: the word, the guesses so far, and the best share of letters found."""

    secret: str
    guesses: int = 0
    best: float = 0.0


class Wordle:
    """Ends with 1 at the right word; after ``max_guesses``, with ``partial`` times the best share.

    The share of a guess counts a letter in its place as 1 and one at another place as ½, of five.
    What a guess adds to the best share is the reward of its turn, so that the score is their sum.
    The column ``secret`` of a prompt is the word; without it, it is drawn by the seed from a list
    of common words. The last ``<guess>``, or the last word of five letters, is the guess: any
    letters will do. The rules are told before the first turn.

    >>> env = Wordle(partial=0.5)
    >>> state = env.start(Prompt(id="0", text="Play.", columns={"secret": "crane"}))
    >>> env.reply(state, Turn(tokens=(), text="<guess>react</guess>"))
    Observation(content='\\nR E A C T\\nY Y G Y X\\n', reward=0.25)
    >>> env.reply(state, Turn(tokens=(), text="crane")).value
    0.75
    """

    def __init__(
        self, *, max_guesses: int = 6, partial: float = 0.0, chat: bool | None = None
    ) -> None:
        if max_guesses < 1:
            raise ValueError(f"max_guesses: must be at least 1, got {max_guesses}")
        if not 0.0 <= partial <= 1.0:
            raise ValueError(f"partial: must be from 0 to 1, got {partial}")
        self._max_guesses = max_guesses
        self._partial = partial
        self._around = "" if chat else "\n"

    def start(self, prompt: Prompt, *, seed: int | None = None) -> Guessed:
        """A new game: the word of the prompt, or one that the seed (or the prompt's id) draws."""
        drawn = random.Random(prompt.id if seed is None else seed).choice(WORDS)
        secret = str(prompt.columns.get("secret", drawn)).strip().lower()
        if not re.fullmatch("[a-z]{5}", secret):
            raise ValueError(f"prompt {prompt.id!r}: secret {secret!r} is not a five-letter word")
        return Guessed(secret)

    def opening(self, state: Guessed) -> str:
        """The rules."""
        return f"\n\n{RULES.format(guesses=self._max_guesses)}{self._around}"

    def reply(self, state: Guessed, turn: Turn) -> Answer:
        """How the letters of a guess are judged; or the end."""
        state.guesses += 1
        guess = guessed(turn.text)
        marks = "" if guess is None else judged(guess, state.secret)
        if guess == state.secret:
            return self._end(state, 1.0 - self._partial * state.best, found=True)
        best = max(state.best, (marks.count("G") + marks.count("Y") / 2) / LENGTH)
        earned, state.best = self._partial * (best - state.best), best
        if state.guesses >= self._max_guesses:
            return self._end(state, earned, found=False)
        said = f"{' '.join((guess or '').upper())}\n{' '.join(marks)}" if guess else "No guess: "
        said += "" if guess else "write a word of five letters as <guess>WORD</guess>."
        text = f"{self._around}{said}{self._around}"
        return Observation(text, reward=earned) if earned else text

    def _end(self, state: Guessed, value: float, *, found: bool) -> Score:
        parts = {"found": float(found), "guesses": float(state.guesses)}
        return Score(value=value, parts=parts)


def guessed(text: str) -> str | None:
    """The word that a text guesses: in the last tag, or the last of five letters; None without.

    >>> guessed("Not plane: <guess>Crane</guess>"), guessed("plane or crane"), guessed("no")
    ('crane', 'crane', None)
    """
    words = _TAGGED.findall(text) or _WORD.findall(_TAG.sub(" ", text))
    word = words[-1].strip() if words else ""
    return word.lower() if _WORD.fullmatch(word) else None


def judged(guess: str, secret: str) -> str:
    """A mark for each letter: G in its place, Y elsewhere in the word, X not in it.

    A letter is found as often as the word has it, in its place first.

    >>> judged("speed", "abide"), judged("eerie", "crepe")
    ('XXYXY', 'YXYXG')
    """
    left = Counter(there for letter, there in zip(guess, secret, strict=True) if letter != there)
    marks = []
    for letter, there in zip(guess, secret, strict=True):
        found = letter != there and left[letter] > 0
        left[letter] -= found
        marks.append("G" if letter == there else "Y" if found else "X")
    return "".join(marks)
