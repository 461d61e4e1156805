"""What a chat template writes behind a turn of the policy, and nothing of what stands before.

A reply is rendered behind a stand-in for the policy's turn, and the difference is taken from where
the stand-in ends: a template that rewrites old turns (Qwen3 leaves out their thoughts) never sees
what was sampled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Sequence

from posttrain.data.chats import SHOWN, Chat, ChatRefused
from posttrain.data.control_tokens import ControlTokens
from posttrain.data.tool_formats import Message, as_user, call_id, called

MARK = "what0was0sampled"  # the stand-in: no template strips, splits or escapes it
NUM_KEPT = 8192  # replies whose tokens are remembered: a game has some thousands of positions
LONGEST_KEPT = 1000  # characters of such a reply: longer ones hardly come again


class ReplyRenderer:
    """Encodes replies to the policy by a chat template: ``write`` gives its texts of chats.

    Without ``tools`` the template knows no messages of tools, and they become the user's.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Chat]], list[str]],
        *,
        control: ControlTokens,
        end_tokens: Collection[int],
        tools: bool,
    ) -> None:
        self._write = write
        self._control = control
        self._end_tokens = end_tokens
        self._tools = tools
        self._tried: dict[tuple[str, ...], tuple[bool, int]] = {}
        # An environment of few words says the same again and again, and a template is slow.
        self._kept = functools.lru_cache(NUM_KEPT)(self._encoded)

    def encode(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """The tokens from behind the policy's turn to where it speaks again.

        Where the turn has not ``ended`` with its end token, what the template writes there stands
        first: the end token is then no choice of the policy.
        """
        said = json.dumps([dict(message) for message in messages])
        return (self._kept if len(said) <= LONGEST_KEPT else self._encoded)(said, ended)

    def _encoded(self, said: str, ended: bool) -> tuple[int, ...]:
        messages = json.loads(said)
        roles = tuple(message["role"] for message in messages)
        if roles not in self._tried:
            self._tried[roles] = self.try_roles(roles)
        merge, num_calls = self._tried[roles]
        chat, hidden = self._control.hide(_chat(messages, merge=merge, num_calls=num_calls))
        _, _, behind = self._write([(chat, True)])[0].partition(MARK)
        tokens = self._control.encode(behind, hidden)
        end = self._end(tokens)
        if ended:
            return tokens[end + 1 :]
        # A stand-in for a call has more text to come, which is not that of the policy's own.
        return tokens[end:] if num_calls else tokens

    def try_roles(self, roles: Sequence[str]) -> tuple[bool, int]:
        """How a reply of messages with such roles is written; raises where it cannot be.

        Whether they become one message of the user, and the number of calls in the stand-in.
        """
        said = [f"message {number} of {len(roles)}." for number in range(1, len(roles) + 1)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        wrong = sorted({*roles} - {"user", "tool", "system"})
        if wrong or not roles:
            raise ValueError(
                f"reply: a message with the role {wrong[0] if wrong else None!r}; an environment "
                "speaks as user, tool or system"
            )
        num_tools = roles.count("tool")
        ways: list[tuple[bool, int]] = [(True, 0)]
        if self._tools or not num_tools:
            counts = sorted({min(num_tools, 1), num_tools})  # Llama writes one call in a message
            ways = [(False, count) for count in counts]
            if "user" in roles and not num_tools:
                ways.append((True, 0))  # Gemma and Mistral want turns of both sides in alternation
        refused: ChatRefused | None = None
        for merge, num_calls in ways:
            try:
                [text] = self._write([(_chat(messages, merge=merge, num_calls=num_calls), True)])
            except ChatRefused as error:
                refused = refused or error
                continue
            self._check(text, said)
            return merge, num_calls
        assert refused is not None, "there is at least one way"
        raise refused

    def _check(self, text: str, said: Sequence[str]) -> None:
        """Raise unless the reply stands whole behind the end token of the stand-in."""
        _, found, behind = text.partition(MARK)
        wrong = ""
        if not found:
            wrong = "leaves out the assistant's turn"
        elif missing := [content for content in said if content not in behind]:
            wrong = f"leaves out {missing[0]!r} of the reply"
        else:
            closing = behind[: behind.index(said[0])]
            ends = [token in self._end_tokens for token in self._control.encode(closing, {})]
            if not any(ends):
                wrong = "puts no end token after the assistant's turn"
        if wrong:
            raise ValueError(
                f"chat: the chat template {wrong}, so that what an environment replies cannot be "
                f"told from it: after an assistant's {MARK!r} it writes {behind[:SHOWN]!r}; pass "
                "the policy's end_tokens, fix the template, or set chat = false"
            )

    def _end(self, tokens: Sequence[int]) -> int:
        return next(place for place, token in enumerate(tokens) if token in self._end_tokens)


def _chat(messages: Sequence[Message], *, merge: bool, num_calls: int) -> list[Message]:
    """A chat in which the messages reply to a stand-in for the policy's turn."""
    answered: Message = {"role": "assistant", "content": MARK}
    tools = [message for message in messages if message["role"] == "tool"]
    if num_calls:
        names = [str(message.get("name") or "tool") for message in tools[:num_calls]]
        answered = called(names, arguments={"a": MARK})
    told, ids = [], (call_id(number) for number in range(len(tools)))
    for message in messages:
        if message["role"] != "tool":
            told.append(message)
            continue
        own, given = next(ids), str(message.get("tool_call_id", ""))
        known = given if len(given) == len(own) and given.isalnum() else own  # Mistral's form
        told.append({"name": "tool", **message, "tool_call_id": known})
    return [{"role": "user", "content": "a"}, answered, *(as_user(messages) if merge else told)]
