"""Text to tokens and back: the only place in posttrain where that happens.

A prompt is rendered once, and from then on its tokens are the truth: what an engine samples is
never decoded and encoded again, because the second encoding may differ from the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.data.chats import (
    SYSTEM,
    Chat,
    ChatRefused,
    TemplateLimit,
    TemplateRefusal,
    try_template,
    write_chats,
)
from posttrain.data.control_tokens import ControlTokens, Hidden, may_open, shown
from posttrain.data.learned_turns import (
    LearnedPart,
    LearnedRow,
    asked_for,
    conversation_rows,
    whole_text,
)
from posttrain.data.replies import ReplyRenderer
from posttrain.data.tool_formats import (
    PLAIN,
    SAMPLE,
    Message,
    describe_tools,
    in_plain,
    tool_format,
    uses_tools,
    with_tools,
)
from posttrain.types import Prompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTooLong(ValueError):  # noqa: N818 - named after what is wrong
    """A prompt has more tokens than allowed; a caller may leave it out, and must say so."""


class Template:
    """Renders prompts and conversations for one tokenizer.

    ``chat``: True wraps plain text as a user's message, False takes text as it stands, None lets
    each prompt decide (messages are chat, text is not). ``system`` opens every chat that has no
    system message. ``end_tokens`` are those of the policy; without, the tokenizer's own. A special
    token that the text of a prompt or completion spells is read as text, unless
    ``special_tokens`` is "tokens". A chat template that leaves out a message is refused. ``tools``
    are JSON schemas: the chat template writes them, or they stand in plain text before the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool | None = None,
        system: str = "",
        max_prompt_tokens: int | None = None,
        end_tokens: Sequence[int] = (),
        special_tokens: Literal["text", "tokens"] = "text",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if chat is False and system:
            raise ValueError("system: a system message needs a chat; set chat = true")
        self.tokenizer = tokenizer
        self.chat = chat
        self.system = system
        self.max_prompt_tokens = max_prompt_tokens
        self.end_tokens = frozenset(end_tokens or {tokenizer.eos_token_id} - {None})
        self.tools = tuple(tools)
        self._special_tokens = special_tokens
        self._ahead: dict[str, str] = {}
        self._tried: set[tuple[tuple[str, bool], ...]] = set()
        # Only the start tokens: some tokenizers also put an end token behind every text.
        start = tokenizer.bos_token_id
        self._start = (start,) if start is not None and self._starts_with(start) else ()
        if chat:
            self.try_chat(self._messages(Prompt(id="", text="a question")))

    @functools.cached_property
    def control(self) -> ControlTokens:
        """The tokens that no text of the data may become."""
        written = ""
        if self.tokenizer.chat_template and may_open(self.tokenizer):
            turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
            with contextlib.suppress(ChatRefused):  # a template may refuse such a chat
                [written] = self._as_written([(turns, True)], tools=())
        return ControlTokens(
            self.tokenizer,
            end_tokens=self.end_tokens,
            written=written,
            as_text=self._special_tokens == "text",
        )

    def render(self, prompt: Prompt) -> Prompt:
        """The prompt with its ``tokens``, and with ``text`` as exactly what they spell."""
        if self._is_chat(prompt):
            text, hidden = self._prompt_text(prompt)
            tokens = self.control.encode(text, hidden)
            text = shown(text, hidden)
        else:
            text, tokens = self._plain(prompt)
        if not tokens:
            raise ValueError(
                f"prompt {prompt.id!r}: it has no tokens, and a model needs one to begin from; "
                "give it text or messages"
            )
        limit = self.max_prompt_tokens
        if limit is not None and len(tokens) > limit:
            raise PromptTooLong(
                f"prompt {prompt.id!r}: {len(tokens)} tokens, and max_prompt_tokens is {limit}; "
                "raise it, or leave such prompts out"
            )
        return dataclasses.replace(prompt, text=text, tokens=tokens)

    def encode_completion(
        self, text: str, end_token: int, *, sampled: bool = False, ended: bool = True
    ) -> tuple[int, ...]:
        """The tokens of a completion to learn from, with the end token once where it has ``ended``.

        Where a policy has ``sampled`` it, the special tokens in its text were tokens.
        """
        tokens = self.control.encode(text, {} if sampled else None)
        return tokens if tokens[-1:] == (end_token,) or not ended else (*tokens, end_token)

    def encode_text(self, text: str, end_token: int) -> tuple[int, ...]:
        """The tokens of a text to learn whole: behind the start token, up to the end token."""
        tokens = self.encode_completion(text, end_token)
        begun = tokens[: len(self._start)] == self._start
        return tokens if begun else (*self._start, *tokens)

    def render_conversation(
        self, messages: Sequence[Message], *, learn: LearnedPart = "assistant"
    ) -> list[LearnedRow]:
        """The tokens of a conversation, and what of them is learned: :func:`conversation_rows`."""
        chat, hidden = self.control.hide(self._opened(messages))
        return conversation_rows(
            chat,
            write=lambda part, reply: self._chat_text(part, reply=reply),
            encode=lambda text: self.control.encode(text, hidden),
            end_tokens=self.end_tokens,
            learn=learn,
        )

    def encode_reply(
        self, reply: str | Sequence[Message], turn: Turn | None = None
    ) -> tuple[int, ...]:
        """The tokens of a reply to the policy's ``turn``; without one, to a turn that has ended.

        Messages become what the chat template writes from behind that turn up to where the
        assistant speaks again. In a chat text is a message of the user, but where a stop string
        left the turn open: there, and without a chat, it is read as it stands. A special token that
        a reply spells is read as text.
        """
        ended = turn is None or not self.end_tokens.isdisjoint(turn.tokens[-1:])
        if isinstance(reply, str):
            goes_on = not ended and turn is not None and turn.stop_reason == "stop_string"
            if not self.chat or goes_on:
                return self.control.encode(reply)
            reply = [{"role": "user", "content": reply}]
        return self._replies.encode(reply, ended=ended)

    def try_replies(self) -> None:
        """Refuse a chat template that cannot write what an environment replies, and say why."""
        if self.chat:
            for roles in [("user",), *([("tool",), ("tool", "tool")] if self.tools else [])]:
                self._replies.try_roles(roles)

    @functools.cached_property
    def tool_format(self) -> str:
        """The format in which the chat template writes calls, "json_tags" where it knows none."""
        if not self.tokenizer.chat_template:
            return PLAIN
        return tool_format(lambda chat: self._as_written([(chat, False)], tools=[SAMPLE])[0])

    @functools.cached_property
    def _replies(self) -> ReplyRenderer:
        return ReplyRenderer(
            functools.partial(self._as_written, tools=()),  # they stand in the prompt already
            control=self.control,
            end_tokens=self.end_tokens,
            tools=self.tool_format != PLAIN,
        )

    @functools.cached_property
    def _own_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template writes itself."""
        if not self.tools or self.tool_format == PLAIN:
            return ()
        spelled = self.control.spelled(json.dumps(self.tools, ensure_ascii=False))
        if spelled and self.control.as_text:
            raise ValueError(
                f"tools: their schemas spell the special token {min(spelled)!r}, which could end "
                "the prompt's turn; change their descriptions"
            )
        return self.tools

    def prepare(
        self,
        prompts: Sequence[Prompt] = (),
        *,
        conversations: Sequence[Sequence[Message]] = (),
        learn: LearnedPart = "assistant",
    ) -> None:
        """Run the chat template on the chats that are rendered next, in one request: far faster.

        The texts are cached until the next call.
        """
        chats: list[Chat] = []
        for prompt in prompts:
            if self._is_written(prompt):
                chats.append((self.control.hide(self._messages(prompt))[0], True))
        for messages in conversations:
            chat, _ = self.control.hide(self._opened(messages))
            chats += asked_for(chat, learn)
        distinct = {_key(messages, reply): (messages, reply) for messages, reply in chats}
        texts = self._write(list(distinct.values())) if distinct else []
        self._ahead = dict(zip(distinct, texts, strict=True))

    def question(self, prompt: Prompt) -> str:
        """What makes two prompts the same: how they are written for the model, but for spaces."""
        written = self._is_written(prompt)
        if not written and not prompt.text:
            self._need_chat_template()
        return words(shown(*self._prompt_text(prompt)) if written else prompt.text)

    def encode_exchange(self, prompt: Prompt, completion: str) -> tuple[int, ...]:
        """Prompt and completion as this tokenizer's own model expects to read them.

        A chat goes through its template; text gets an end token; an encoder, whose tokenizer puts
        its own tokens around and between texts, gets the pair of texts. Chats are
        written as plain text for a model that knows no chat.
        """
        if self._is_chat(prompt):
            reply = {"role": "assistant", "content": completion}
            chat, hidden = self.control.hide([*self._messages(prompt), reply])
            text = whole_text(chat, lambda part, reply: self._chat_text(part, reply=reply))
            return self.control.encode(text, hidden)
        if prompt.messages and not prompt.text:
            text = "\n".join(message["content"] for message in prompt.messages)
            prompt = dataclasses.replace(prompt, text=text, messages=())
        pairs = self.tokenizer.cls_token_id is not None and self.tokenizer.sep_token_id is not None
        if pairs or not self.end_tokens:
            return self.control.encode_pair(prompt.text, completion)
        end = self.tokenizer.eos_token_id
        return (*self.render(prompt).tokens, *self.encode_completion(completion, end))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion without the end and pad tokens behind it; tags stay."""
        dropped = self.end_tokens | {self.tokenizer.pad_token_id}
        length = len(tokens)
        while length and tokens[length - 1] in dropped:
            length -= 1
        return self.tokenizer.decode(
            list(tokens[:length]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _is_chat(self, prompt: Prompt) -> bool:
        return bool(prompt.messages) if self.chat is None else self.chat

    def _is_written(self, prompt: Prompt) -> bool:
        """Whether a prompt goes through the chat template: messages always do."""
        chat_only = bool(prompt.messages) and not prompt.text
        return self._is_chat(prompt) or (chat_only and bool(self.tokenizer.chat_template))

    def _messages(self, prompt: Prompt) -> Sequence[Message]:
        return self._opened(prompt.messages or [{"role": "user", "content": prompt.text}])

    def _opened(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the system's, and with tools that the template cannot write."""
        if self.system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        if not (self.tools or uses_tools(messages)) or self.tool_format != PLAIN:
            return list(messages)
        return with_tools(in_plain(messages), self.tools) if self.tools else in_plain(messages)

    def _plain(self, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        if self.system:
            raise ValueError(
                f"prompt {prompt.id!r}: plain text cannot carry a system message; set chat = true, "
                "or system to nothing"
            )
        if prompt.messages and not prompt.text:
            self._need_chat_template()
            raise ValueError(f"prompt {prompt.id!r}: it has messages only; set chat = true")
        text = f"{describe_tools(self.tools)}\n\n{prompt.text}" if self.tools else prompt.text
        tokens = self.control.encode(text)
        if tokens[: len(self._start)] == self._start:
            return text, tokens
        return f"{self.tokenizer.bos_token}{text}", (*self._start, *tokens)

    def _starts_with(self, token: int) -> bool:
        return self.tokenizer("a").input_ids[:1] == [token]

    def _need_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            tiny = self.tokenizer.name_or_path == "tiny"
            raise ValueError(
                "chat: this tokenizer has no chat template; "
                + (
                    "that of the tiny model has one with model.options = { chat = true }, from "
                    'Python model_options={"options": {"chat": True}}; or write plain prompts'
                    if tiny
                    else "set chat = false and write plain prompts (text, not messages), or start "
                    "from the instruct version of the model"
                )
            )

    def _prompt_text(self, prompt: Prompt) -> tuple[str, Hidden]:
        """A prompt as its chat template writes it, with stand-ins for what is no control token."""
        chat, hidden = self.control.hide(self._messages(prompt))
        return self._chat_text(chat, reply=True), hidden

    def _chat_text(self, messages: Sequence[Message], *, reply: bool) -> str:
        text = self._ahead.get(_key(messages, reply))
        return self._write([(messages, reply)])[0] if text is None else text

    def _write(self, chats: Sequence[Chat]) -> list[str]:
        """The texts of chats, once :meth:`try_chat` has passed for the roles of each."""
        for messages, _ in chats:
            self.try_chat(messages)
        return self._as_written(chats)

    def try_prompt(self, prompt: Prompt) -> None:
        """:meth:`try_chat` of a prompt, where it is a chat."""
        if self._is_written(prompt):
            self.try_chat(self._messages(prompt))

    def try_chat(self, messages: Sequence[Message]) -> None:
        """:func:`try_template` of a chat, once for chats of the same kind."""
        kinds = tuple((message["role"], bool(message.get("tool_calls"))) for message in messages)
        if kinds and kinds not in self._tried:
            try_template(messages, self._as_written, file=self._file())
            self._tried.add(kinds)

    def _as_written(
        self, chats: Sequence[Chat], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[str]:
        self._need_chat_template()
        given = list(self._own_tools if tools is None else tools) or None
        names = {**self.tokenizer.special_tokens_map, "tools": given}
        template = self.tokenizer.get_chat_template(tools=given or list(self.tools) or None)
        try:
            return write_chats(template, chats, names=names)
        except TemplateLimit as error:
            raise ValueError(
                f"chat: the chat template ({self._file()}) {error}; fix it, or set chat = false "
                "and write plain prompts"
            ) from None
        except TemplateRefusal as error:
            roles = ", ".join(m.get("role", "?") for m in chats[error.number][0])
            raise ChatRefused(
                f"chat: the model's chat template ({self._file()}) refuses messages with the roles "
                f"{roles}: {error}{f'; {SYSTEM}' * ('system' in roles)}"
            ) from None

    def _file(self) -> str:
        """The file of the chat template, as far as the tokenizer knows."""
        folder = Path(self.tokenizer.name_or_path or "")
        names = ("chat_template.jinja", "tokenizer_config.json")
        files = [str(folder / name) for name in names if (folder / name).is_file()]
        return [*files, str(self.tokenizer.name_or_path or "of the tokenizer")][0]


def words(text: str) -> str:
    """A text as questions are compared: neither white space nor the form of a letter counts.

    >>> words("２  + 3")
    '2 + 3'
    """
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _key(messages: Sequence[Message], reply: bool) -> str:
    return json.dumps([messages, reply])
