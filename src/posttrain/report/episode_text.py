"""An episode in words: who wrote what, what it earned, and why it was over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.track.printable import counted
from posttrain.types import Prompt, Rollout, Turn

_ENDS = {"length": " · cut at max_new_tokens", "stop_string": " · ended by a stop string"}
_LIMITS = {
    "max_turns": "the limit on turns was reached",
    "max_tokens": "the limit on tokens was reached",
}
_SHOWN = 8  # turns of a long episode: as many of its beginning as of its end


def heading(rollout: Rollout, place: int) -> str:
    """Who wrote a turn, how long it is, and what it earned or says that the one before earned.

    >>> from posttrain.types import Prompt
    >>> turns = Turn(tokens=(5,), text="5", logprobs=(0.0,)), Turn(tokens=(6, 7), text="no")
    >>> episode = Rollout(prompt=Prompt(id="0", text="2+2="), turns=turns, group=0)
    >>> heading(episode, 0), heading(episode, 1)
    ('policy · turn 1 · 1 token', 'environment · 2 tokens')
    """
    turn = rollout.turns[place]
    number = sum(each.sampled for each in rollout.turns[: place + 1])
    tokens = counted(len(turn.tokens), "token")
    if turn.sampled:
        return f"policy · turn {number} · {tokens}{_ENDS.get(turn.stop_reason, '')}"
    earned = f" · turn {number} earned {turn.reward:+g}" if turn.reward else ""
    return f"environment · {tokens}{earned}"


def opening(opened: Prompt, asked: Prompt) -> str:
    """What an environment has put behind a prompt, or the last message of its user.

    >>> opening(Prompt(id="", text="Play. You begin."), Prompt(id="", text="Play."))
    ' You begin.'
    """
    if opened.text != asked.text:
        return opened.text.removeprefix(asked.text)
    both = zip(opened.messages, asked.messages, strict=True)
    return "".join(new["content"].removeprefix(old["content"]) for new, old in both)


def said(turn: Turn) -> str:
    """The text of a turn, set in; of one without text, how many tokens it has.

    >>> said(Turn(tokens=(5, 6), text=""))
    '  (no text: 2 tokens)'
    """
    return set_in(turn.text or f"(no text: {counted(len(turn.tokens), 'token')})")


def set_in(text: str) -> str:
    """A text with all of its lines set in, so that none of them passes for a heading."""
    return "\n".join(f"  {line}" for line in text.split("\n"))


def ending(rollout: Rollout, *, no_room: bool = False) -> list[str]:
    """Why an episode was over, and its score with its parts; ``no_room``: the context was full."""
    score = rollout.score
    why = _LIMITS.get(rollout.limit, "the environment ended it")
    why = "the model's context has no room for another turn" if no_room else why
    if score is None:
        return [f"over: {why}"]
    if not score.ok:
        return [f"over: {why}", f"no score ({score.state}): {score.reason}"]
    parts = [f"{name} {value:g}" for name, value in score.parts.items()]
    lines = [f"over: {why}", " · ".join([f"score {score.value:g}", *parts])]
    if any(turn.reward for turn in rollout.turns):
        earned = (f"turn {n}: {value:+g}" for n, value in enumerate(rollout.earned, start=1))
        lines.append("earned by " + ", ".join(earned))
    return lines


def transcript(rollout: Rollout) -> str:
    """What was said after the prompt: an answer alone as it is, of an episode all turns."""
    if len(rollout.turns) == 1 and rollout.score is None:
        return rollout.text
    lines = [
        line
        for place, turn in enumerate(rollout.turns)
        for line in (heading(rollout, place), said(turn))
    ]
    return "\n".join(lines if rollout.score is None else [*lines, *ending(rollout)[1:]])


def exchange(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Turns as a run folder has them: who wrote each, its text, and what it earned, if anything.

    Of a long episode the middle is only counted, by a row of nobody.

    >>> turns = [{"sampled": True, "text": "5", "reward": -0.5}, {"sampled": False, "text": "no"}]
    >>> exchange(turns)
    [('policy', '5', '-0.5'), ('environment', 'no', '')]
    >>> exchange(turns * 5)[4]
    ('', '… 2 more turns …', '')
    """
    rows = []
    for turn in turns:
        reward, who = turn.get("reward") or 0.0, "policy" if turn["sampled"] else "environment"
        earned = f"{reward:+.3g}" if abs(reward) > 1e-9 else ""  # a difference leaves a trace of 0
        rows.append((who, str(turn["text"]).strip("\n"), earned))
    if len(rows) > _SHOWN:
        left_out = counted(len(rows) - _SHOWN, "more turn")
        rows[_SHOWN // 2 : -_SHOWN // 2] = [("", f"… {left_out} …", "")]
    return rows
