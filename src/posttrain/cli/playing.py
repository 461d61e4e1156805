"""``posttrain play``: an episode in an environment, live, with a person in a place of it or not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from posttrain.cli.eval_arguments import stopping
from posttrain.config.read import parse_value
from posttrain.config.specs import complete_task, typed_task
from posttrain.track.printable import counted, harmless
from posttrain.track.progress import loading
from posttrain.track.safe_terminal import Terminal

STYLES = {"policy": "bold cyan", "environment": "bold magenta"}
TOLD = {
    "policy": "You are the policy: a line is a turn (\\n is a line break in it).",
    "env": "You are the environment: a line is a reply (\\n is a line break in it); /end ends the "
    "episode, /end 1 with a score.",
}


def play_episodes(
    model: str,
    env: str | None,
    *,
    options: Sequence[str],
    overrides: Sequence[str],
    human: Literal["policy", "env"] | None,
    episodes: int,
    split: Literal["train", "test"],
    index: int,
    seed: int,
    stop: Sequence[str] | None,
    **asked: Any,
) -> int:
    """Play episodes and print them; what else is ``asked`` for is as of ``open_player``.

    Returns the exit code: 1 where an episode is invalid, and not merely without a score.
    """
    chosen = _options(options)
    _check(env, chosen, task=asked["task"], overrides=overrides)
    watch = _Watch(human)
    with loading():
        from posttrain.build.model_source import find_source
        from posttrain.stages.generate import open_player

    player = open_player(
        find_source(model),
        env,
        options=chosen,
        overrides=[*overrides, *stopping(stop)],
        human=human,
        ask=watch.ask,
        show=watch.show,
        **asked,
    )
    watch.decode = player.setup.template.decode
    typed = asked["prompt"] is not None
    with contextlib.closing(player):
        watch.say(TOLD.get(human or "", ""), style="dim")
        for number in range(episodes):
            place = 0 if typed else index + number
            which = "" if typed else f"{split} prompt {place}, "
            told = f"episode {number + 1} of {episodes} · {which}seed {seed + number}"
            watch.say(f"\n{told}" if number else told)
            watch.asked = player.prompt(split, place)
            try:
                watch.end(player.play(watch.asked, seed=seed + number))
            except EOFError:
                watch.say("no more input: the episode ends here, without a score")
            if watch.input_over:
                break
    return int(watch.broken)


class _Watch:
    """Prints an episode as it goes on, and reads what a person types."""

    def __init__(self, human: str | None) -> None:
        self.input_over = self.broken = False
        self.decode: Callable[[Sequence[int]], str] = str
        self.asked: Any = None  # the prompt, before the environment has opened
        self._human = human
        self._console = Terminal()
        self._last: Any = None

    def say(self, text: str, *, style: str = "") -> None:
        if text:
            line = Text(harmless(text), style=style)
            self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, rollout: Any) -> None:
        """The prompt, with what the environment opens with; or the turn that is new."""
        from posttrain.report.episode_text import heading, opening, said, set_in

        self._last = rollout
        if not rollout.turns:
            tokens = rollout.prompt.tokens
            self.say(f"prompt · {counted(len(tokens), 'token')}", style="bold")
            self.say(set_in(self.decode(tokens)))
            if opened := opening(rollout.prompt, self.asked):
                self.say("environment · opens, in the prompt", style=STYLES["environment"])
                self.say(set_in(opened))
            return
        head = heading(rollout, len(rollout.turns) - 1)
        writer = head.partition(" ")[0]
        you = {"policy": "policy", "environment": "env"}[writer] == self._human
        self.say(head.replace(writer, f"{writer} (you)", 1) if you else head, style=STYLES[writer])
        self.say(said(rollout.turns[-1]))

    def end(self, rollout: Any) -> None:
        """Why it was over, and the score."""
        from posttrain.report.episode_text import ending
        from posttrain.stages.generate import is_broken

        self.broken |= is_broken(rollout)
        shown = self._last
        no_room = len(shown.turns) > len(rollout.turns)
        lines = ending(rollout, no_room=no_room)
        if self.input_over:
            lines[0] = "over: no more input"
        self.say("\n".join(lines), style="bold")

    def ask(self, read: str) -> str:
        """A line that was typed or piped; EOFError where there is none."""
        if sys.stdin is not None and sys.stdin.isatty():
            self._console.print("> ", end="")
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            self.input_over = True
            raise EOFError
        return line.removesuffix("\n").replace("\\n", "\n")


def _options(given: Sequence[str]) -> dict[str, Any]:
    """``--env KEY=VALUE`` as options of the environment."""
    chosen: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ValueError(f"--env: expected KEY=VALUE, got {item!r}")
        chosen[name] = parse_value(value)
    return chosen


def _check(
    env: str | None, options: dict[str, Any], *, task: str | None, overrides: Sequence[str]
) -> None:
    """Refuse what would change nothing, and unknown names before anything is loaded."""
    for word in overrides:
        if not word.startswith("--") and overrides.index(word) == 0:
            raise ValueError(f"play: one environment; {word!r} is a second one")
        name = word.partition("=")[0]
        sections = ("--model.", "--run.", "--task.", "--rewards.", "--grading.")
        if word.startswith("--") and not word.startswith(sections):
            known = ", ".join(f"{section}KEY" for section in sections)
            raise ValueError(f"play: {name} has no effect on an episode; it takes {known}")
    loads = env is None or ":" in env or env.endswith(".toml") or Path(env).expanduser().is_dir()
    named = {} if loads else {"env": {"name": env, **options}}
    if named or task is not None:
        complete_task({**typed_task(task or "arithmetic"), **named}, rewards=None)
