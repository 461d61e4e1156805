"""Text to tokens and back: the only place in posttrain where that happens.

A prompt is rendered once, and from then on its tokens are the truth: what an engine samples is
never decoded and encoded again, because the second encoding may differ from the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from posttrain.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


class PromptTooLong(ValueError):  # noqa: N818 - it says what is wrong
    """A prompt has more tokens than allowed; a caller may leave it out, and must say so."""


class Template:
    """Renders prompts and conversations for one tokenizer.

    ``chat``: True wraps plain text as a user's message, False takes text as it stands, None lets
    each prompt decide (messages are chat, text is not). ``system`` opens every chat that has no
    system message. ``end_tokens`` are those of the policy; without, the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool | None = None,
        system: str = "",
        max_prompt_tokens: int | None = None,
        end_tokens: Sequence[int] = (),
    ) -> None:
        if chat is False and system:
            raise ValueError("system: a system message needs a chat; set chat = true")
        self.tokenizer = tokenizer
        self.chat = chat
        self.system = system
        self.max_prompt_tokens = max_prompt_tokens
        self.end_tokens = frozenset(end_tokens or {tokenizer.eos_token_id} - {None})
        if chat:
            self._need_chat_template()
        # Some tokenizers also put an end token behind every text; a prompt wants the start alone.
        start = tokenizer.bos_token_id
        self._start = (start,) if start is not None and self._starts_with(start) else ()

    def render(self, prompt: Prompt) -> Prompt:
        """The prompt with its ``tokens``, and with ``text`` as exactly what they spell."""
        if self._is_chat(prompt):
            text = self._chat_text(self._messages(prompt), reply=True)
            tokens = self._encode(text)
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

    def encode_completion(self, text: str, end_token: int) -> tuple[int, ...]:
        """The tokens of a completion to learn from, ending with the end token, once."""
        tokens = self._encode(text)
        return tokens if tokens[-1:] == (end_token,) else (*tokens, end_token)

    def render_conversation(
        self, messages: Sequence[Message]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The tokens of a conversation, and a mask that is True on what the assistant wrote.

        Each assistant turn is what its template adds to the prompt before it, up to its end token:
        so a turn is learned from the very tokens that will stand there when it is asked for.
        """
        messages = self._with_system(messages)
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("messages: no assistant turn, so there is nothing to learn from")
        text = ""
        tokens: list[int] = []
        mask: list[bool] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._chat_text(messages[:index], reply=True)
            through = self._chat_text(messages[: index + 1], reply=False)
            before = self._encode(_suffix(prompt, text))
            turn = self._encode(_suffix(through, prompt))
            length = self._length_to_end(turn)
            tokens += [*before, *turn]
            mask += [False] * len(before) + [position < length for position in range(len(turn))]
            text = through
        return tuple(tokens), tuple(mask)

    def encode_exchange(self, prompt: Prompt, completion: str) -> tuple[int, ...]:
        """Prompt and completion as this tokenizer's own model expects to read them.

        A chat as its template writes it; text with an end token behind; for an encoder, whose
        tokenizer opens and parts texts with tokens of their own, the pair of texts. Chats are
        written as plain text for a model that knows no chat.
        """
        if self._is_chat(prompt):
            reply = {"role": "assistant", "content": completion}
            text = self._chat_text([*self._messages(prompt), reply], reply=False)
            return self._encode(text)
        if prompt.messages and not prompt.text:
            text = "\n".join(message["content"] for message in prompt.messages)
            prompt = dataclasses.replace(prompt, text=text, messages=())
        pairs = self.tokenizer.cls_token_id is not None and self.tokenizer.sep_token_id is not None
        if pairs or not self.end_tokens:
            return tuple(self.tokenizer(prompt.text, completion).input_ids)
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

    def _messages(self, prompt: Prompt) -> Sequence[Message]:
        return self._with_system(prompt.messages or [{"role": "user", "content": prompt.text}])

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if not self.system or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def _plain(self, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        if self.system:
            raise ValueError(
                f"prompt {prompt.id!r}: plain text cannot carry a system message; set chat = true, "
                "or system to nothing"
            )
        if prompt.messages and not prompt.text:
            self._need_chat_template()
            raise ValueError(f"prompt {prompt.id!r}: it has messages only; set chat = true")
        tokens = self._encode(prompt.text)
        if tokens[: len(self._start)] == self._start:
            return prompt.text, tokens
        return f"{self.tokenizer.bos_token}{prompt.text}", (*self._start, *tokens)

    def _encode(self, text: str) -> tuple[int, ...]:
        # Quietly: what is too long is left out and counted, it never reaches the model.
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _starts_with(self, token: int) -> bool:
        return self.tokenizer("a").input_ids[:1] == [token]

    def _need_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "chat: this tokenizer has no chat template; set chat = false and write plain "
                "prompts (text, not messages), or start from the instruct version of the model"
            )

    def _chat_text(self, messages: Sequence[Message], *, reply: bool) -> str:
        self._need_chat_template()
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=reply
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            roles = ", ".join(message.get("role", "?") for message in messages)
            raise ValueError(
                f"chat: the model's chat template refuses messages with the roles {roles}: {error}"
            ) from error

    def _length_to_end(self, turn: Sequence[int]) -> int:
        """How many tokens of a turn the assistant wrote; a template's newline after it is not."""
        ends = [index for index, token in enumerate(turn) if token in self.end_tokens]
        if not ends:
            raise ValueError(
                "chat: the chat template puts no end token behind an assistant's turn, so the "
                "model would never learn to stop; pass the policy's end_tokens, or change it"
            )
        return ends[-1] + 1


def _suffix(text: str, prefix: str) -> str:
    """What ``text`` adds to ``prefix``, which it must begin with."""
    if not text.startswith(prefix):
        raise ValueError(
            "chat: the chat template writes the beginning of a conversation differently once more "
            "follows (some leave out old thoughts), so its turns cannot be learned in one go; "
            "split it so that each part ends with its only assistant turn, or change the template. "
            f"{prefix[-40:]!r} is no longer there"
        )
    return text[len(prefix) :]
