"""What flows before tensors: prompts, turns, rollouts and their scores, in plain Python."""

from __future__ import annotations

import html
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Literal

ScoreState = Literal["ok", "invalid", "timeout", "crashed"]
StopReason = Literal["stop", "length", "stop_string", "max_turns", "max_tokens"]


def shortened(text: str, length: int) -> str:
    """A text of at most so many characters; of a longer one its beginning and its end.

    >>> shortened("2+2=", 5), shortened("a long question", 9)
    ('2+2=', 'a lo…tion')
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def html_table(rows: Sequence[Sequence[object]], *, title: str = "") -> str:
    """A table for a notebook; models and strangers wrote its texts, so all of them are escaped.

    >>> html_table([["prompt", "answer"], ["1<2", "<b>"]])
    '<table><tr><th>prompt</th><th>answer</th></tr><tr><td>1&lt;2</td><td>&lt;b&gt;</td></tr></table>'
    """
    head = f"<caption>{html.escape(title)}</caption>" if title else ""
    lines = [
        "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
        for tag, row in zip(chain(["th"], repeat("td")), rows, strict=False)
    ]
    return f"<table>{head}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question put to the policy, and what a reward may want to know about it.

    A task writes ``text``, or ``messages`` for a chat model; ``posttrain.data.template`` renders
    them once into the exact ``tokens`` the engine sees. ``columns`` reach the reward by name.

    >>> Prompt(id="train-0", text="2+3=", columns={"answer": "5"}).columns["answer"]
    '5'
    """

    id: str
    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    tokens: tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What is asked, for a reader: of a chat without a text all messages, each with its role.

        >>> Prompt(id="0", text="", messages=({"role": "user", "content": "2+3="},)).shown
        '2+3='
        """
        if self.text or [message.get("role") for message in self.messages] == ["user"]:
            return self.text or self.messages[0].get("content", "")
        turns = (f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in self.messages)
        return "\n".join(turns)


def with_opening(prompt: Prompt, said: str) -> Prompt:
    """The prompt with a text behind the last message of the user.

    >>> with_opening(Prompt(id="0", text="Play.", messages=({"role": "user", "content": "Play."},)),
    ...     " You begin.").messages
    ({'role': 'user', 'content': 'Play. You begin.'},)
    """
    messages = list(prompt.messages)
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            content = messages[place]["content"] + said
            messages[place] = {**messages[place], "content": content}
            break
    # A chat without a text of its own stays one: else what it opens with would be all of its text.
    text = prompt.text + said if prompt.text or not messages else ""
    return replace(prompt, text=text, messages=tuple(messages))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``temperature=0`` is greedy; ``top_k=0`` and ``top_p=1`` are off.

    A completion ends with the token that completes one of the strings of ``stop`` in its text.

    >>> Sampling(temperature=0.7, max_new_tokens=32).truncates
    False
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {self.max_new_tokens}")
        if self.temperature != 0.0 and not 1e-6 <= self.temperature < float("inf"):  # else overflow
            raise ValueError(
                f"temperature: must be 0 (greedy), or at least 1e-6, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k: must be at least 0 (off), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: must be above 0 and at most 1 (off), got {self.top_p}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop: expected strings that are not empty, got {self.stop!r}")

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p removes tokens from the distribution that is sampled."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where the sequences of a call stand in a larger one, which several engines share.

    ``numbers`` are those of its sequences there, one for each, ``turn`` is how many turns of the
    policy they have had: the seed of the larger call decides the same tokens in its parts.
    """

    numbers: tuple[int, ...]
    turn: int = 0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side wrote: the policy, whose tokens have ``logprobs``, or the environment.

    The policy's turns are trained on, the environment's are only read. ``logprobs`` are of the
    distribution really sampled, after temperature, top-k and top-p (greedy decoding reports the
    model's own, at temperature 1); ``version`` is the policy version whose weights drew the tokens.
    A turn that ended by itself holds its end token; one that ran into the length limit has
    ``stop_reason="length"``. One that a stop string ended has ``"stop_string"``: its tokens are all
    that were sampled, its ``text`` ends before that string. Where new weights came in the middle of
    it, ``versions`` has that of each token, and ``version`` is the oldest. ``reward``, of an
    environment's turn, is what the turn of the policy that it answers has earned; ``token_rewards``
    is how much of that each token of that turn has earned, where the environment says so, and the
    last one the rest.

    >>> Turn(tokens=(7, 8), text="4").sampled
    False
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None = None
    stop_reason: StopReason = "stop"
    version: int = 0
    reward: float = 0.0
    token_rewards: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The policy version that drew each token.

        >>> Turn(tokens=(7, 8), text="4", logprobs=(-1.0, -2.0), version=3).token_versions
        (3, 3)
        """
        return self.versions or (self.version,) * len(self.tokens)

    @property
    def sampled(self) -> bool:
        """Whether the policy chose these tokens."""
        return self.logprobs is not None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"logprobs: {len(self.logprobs)} values for {len(self.tokens)} tokens; "
                "an engine must return one log-probability for each token it sampled"
            )
        if self.versions and len(self.tokens) != len(self.versions):
            raise ValueError(f"versions: {len(self.versions)} for {len(self.tokens)} tokens")


@dataclass(frozen=True)
class Observation:
    """What an environment says, with a reward for the policy's turn that it answers.

    ``content`` is text, messages of a chat, or tokens. The score of the episode is the sum of these
    rewards and of what the environment ends it with. ``reward`` is a number, or one for each token
    of that turn.

    >>> Observation("too high", reward=-0.1).content
    'too high'
    """

    content: str | Sequence[Mapping[str, Any]] | Sequence[int]
    reward: float | Sequence[float] = 0.0


def as_number(value: Any, *, mend: str = "") -> float:
    """A number as a float, also a scalar of numpy or torch; a ``TypeError`` for anything else."""
    if type(value) is float:  # what it mostly is, and asking an abstract class takes longer
        return value
    kind = "None" if value is None else f"a {type(value).__name__}"
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        if (count := math.prod(getattr(value, "shape", ()))) != 1:
            raise TypeError(f"{kind} with {count} elements, not a number{mend}")
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{kind}, not a number{mend}")
    return float(value)


def whole(value: Any) -> Any:
    """A value whose ``repr`` shows all of it: that of an array leaves out its middle."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole, value))
    return value.tolist() if getattr(value, "ndim", 0) and hasattr(value, "tolist") else value


def columns_text(prompt: Prompt) -> str:
    """The columns of a prompt in text: where any value is another, it is another text."""
    return repr(sorted(whole(dict(prompt.columns)).items()))


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward's verdict on one completion. Wrong is ``value=0``; broken is another ``state``.

    ``reason`` says in a line why it is broken, ``details`` are a traceback where there is one, and
    ``seconds`` is how long grading took. ``token_rewards``, one for each token of the policy's last
    turn, say which of them earned how much of ``value``; what they leave is the last token's.

    >>> Score(value=1.5, parts={"answer": 1.0, "format": 0.5}).ok
    True
    >>> Score(value=0.0, state="timeout", reason="no answer within 5 s").ok
    False
    """

    value: float
    state: ScoreState = "ok"
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    details: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)
    token_rewards: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the value may enter a baseline, an advantage or a metric."""
        return self.state == "ok"


@dataclass(frozen=True, kw_only=True, repr=False)
class Rollout:
    """A prompt, the turns that followed and their score; ``group`` numbers the prompt in its batch.

    One turn is the ordinary case: the completion. ``greedy`` is the greedy rollout of the same
    prompt with its score, where an advantage takes it for a baseline: the group shares it, and it
    is not trained on. ``engine`` names who sampled it, where several engines do. ``limit`` is the
    limit on turns or tokens that ended it, where one did.

    >>> asked = Turn(tokens=(5, 6), text="6*7=", logprobs=(-1.0, -2.0))
    >>> reply = Turn(tokens=(9,), text="42")
    >>> rollout = Rollout(prompt=Prompt(id="0", text="?"), turns=(asked, reply), group=0)
    >>> rollout.tokens, rollout.mask, rollout.logprobs, rollout.text
    ((5, 6, 9), (True, True, False), (-1.0, -2.0, 0.0), '6*7=')
    >>> rollout
    Rollout('?' → '6*7=', 3 tokens, 2 turns, stop)
    """

    prompt: Prompt
    turns: tuple[Turn, ...]
    group: int
    score: Score | None = None
    greedy: Rollout | None = None
    engine: str = field(default="", compare=False)
    limit: Literal["", "max_turns", "max_tokens"] = ""

    def __repr__(self) -> str:
        """What was asked and answered, in one line: the tokens would be pages."""
        facts = [f"{len(self.tokens)} token{'s' * (len(self.tokens) != 1)}"]
        facts += [f"{len(self.turns)} turns"] if len(self.turns) > 1 else []
        facts += [self.stop_reason] if any(turn.sampled for turn in self.turns) else []
        if self.score is not None:
            facts += [f"score {self.score.value:g}" if self.score.ok else self.score.state]
        asked, answer = shortened(self.prompt.shown, 40), shortened(self.text, 60)
        return f"Rollout({asked!r} → {answer!r}, {', '.join(facts)})"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens after the prompt, of the policy and of the environment."""
        return tuple(chain.from_iterable(turn.tokens for turn in self.turns))

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which of the tokens the policy chose."""
        return tuple(chain.from_iterable((turn.sampled,) * len(turn.tokens) for turn in self.turns))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-prob of each token; 0 where the policy did not choose it."""
        known = (turn.logprobs or (0.0,) * len(turn.tokens) for turn in self.turns)
        return tuple(chain.from_iterable(known))

    @property
    def text(self) -> str:
        """What the policy wrote, one turn after the other, a line break between them."""
        return "\n".join(turn.text for turn in self.turns if turn.sampled)

    @property
    def answer(self) -> str:
        """What the policy wrote in its last turn: that is what rewards score."""
        return next((turn.text for turn in reversed(self.turns) if turn.sampled), "")

    @property
    def stop_reason(self) -> StopReason:
        """The limit that ended the rollout, else why the policy's last turn ended."""
        if self.limit:
            return self.limit
        return next(turn.stop_reason for turn in reversed(self.turns) if turn.sampled)

    @property
    def version(self) -> int:
        """The oldest policy version that drew tokens of it."""
        return min(turn.version for turn in self.turns if turn.sampled)

    @property
    def earned(self) -> tuple[float, ...]:
        """What each turn of the policy has earned; the last one what the score has beyond these.

        >>> guess = Turn(tokens=(5,), text="5", logprobs=(-1.0,))
        >>> turns = guess, Turn(tokens=(9,), text="no", reward=-0.25), guess
        >>> asked, score = Prompt(id="0", text="?"), Score(value=0.75)
        >>> Rollout(prompt=asked, turns=turns, group=0, score=score).earned
        (-0.25, 1.0)
        """
        earned: list[float] = []
        for turn in self.turns:
            if turn.sampled:
                earned.append(0.0)
            elif earned:
                earned[-1] += turn.reward
        if earned and self.score is not None:
            earned[-1] = self.score.value - sum(earned[:-1])
        return tuple(earned)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Scored rollouts for one step, with seconds by name and the number of groups discarded.

    ``position`` counts the prompts used up to this batch and ``num_calls`` the calls of the engine:
    from there the source resumes after this batch, however far ahead of learning it has run.
    ``env`` is what its environment came to: errors by kind, restarts, seconds. ``unfinished`` are
    the batches behind it whose rollouts go on under the next weights (partial rollouts), unscored.
    """

    rollouts: Sequence[Rollout]
    seconds: Mapping[str, float] = field(default_factory=dict)
    resampled: int = 0
    position: int = 0
    num_calls: int = 0
    env: Mapping[str, float] = field(default_factory=dict)
    unfinished: tuple[Collected, ...] = ()


APART = 1_000_003  # a prime above the number of draws of a run


def draw_seed(seed: int, number: int) -> int:
    """The seed of draw ``number`` of a run: those of runs with other seeds are far from it.

    Were they next to each other, draw 1 of the run with seed 0 would be draw 0 of that with seed 1.

    >>> draw_seed(0, 1), draw_seed(1, 0)
    (1, 1000003)
    """
    return seed * APART + number
