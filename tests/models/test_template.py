"""Text to tokens and back, with the tiny tokenizer and templates that misbehave."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from posttrain.data.learned_turns import LearnedPart
from posttrain.data.template import PromptTooLong, Template
from posttrain.models.tiny import CHARACTERS, END, TAGS, build_tokenizer
from posttrain.types import Prompt

CONVERSATION = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "<think>x</think>4"},
)
# As Qwen3 does: thoughts of earlier turns are left out.
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|end|>' }}{% else %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def with_start(tokenizer: PreTrainedTokenizerFast, pattern: str) -> PreTrainedTokenizerFast:
    """The tokenizer with a start token that it puts around every text as ``pattern`` says."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    specials = [("<s>", tokenizer.bos_token_id), (END, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=specials
    )
    return tokenizer


def test_plain_text_stays_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt(id="a", text="2+3=", columns={"answer": "5"})
    rendered = Template(tokenizer).render(prompt)
    assert rendered.text == "2+3="
    assert rendered.tokens == tuple(tokenizer("2+3=").input_ids)
    assert rendered.columns == {"answer": "5"}
    assert Template(tokenizer, chat=False).render(rendered) == rendered


def test_chat_wraps_text_as_a_users_message(tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(tokenizer, chat=True, system="be brief")
    rendered = template.render(Prompt(id="a", text="2+3="))
    assert rendered.text == "<|system|>be brief<|end|><|user|>2+3=<|end|><|assistant|>"
    assert tokenizer.decode(rendered.tokens) == rendered.text


def test_messages_are_chat_unless_told_otherwise(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt(id="a", text="", messages=CONVERSATION[:3])
    expected = "<|user|>1+1=<|end|><|assistant|>2<|end|><|user|>2+2=<|end|><|assistant|>"
    assert Template(tokenizer).render(prompt).text == expected
    with pytest.raises(ValueError, match="it has messages only; set chat = true"):
        Template(tokenizer, chat=False).render(prompt)
    tokenizer.chat_template, tokenizer.name_or_path = None, "some/base"
    with pytest.raises(ValueError, match="no chat template; set chat = false and write plain"):
        Template(tokenizer, chat=False).render(prompt)


def test_a_system_message_of_the_prompts_own_wins(tokenizer: PreTrainedTokenizerFast) -> None:
    own = ({"role": "system", "content": "own"}, *CONVERSATION[:1])
    rendered = Template(tokenizer, system="other").render(Prompt(id="a", text="", messages=own))
    assert rendered.text.startswith("<|system|>own<|end|><|user|>")


@pytest.mark.parametrize("pattern", ["<s> $A", f"<s> $A {END}"])
def test_the_start_token_comes_once_and_no_end_token(
    tokenizer: PreTrainedTokenizerFast, pattern: str
) -> None:
    template = Template(with_start(tokenizer, pattern))
    written = Template(tokenizer, special_tokens="tokens")
    start, plain = tokenizer.bos_token_id, tokenizer("ab", add_special_tokens=False).input_ids
    for renders, text in ((template, "ab"), (written, "ab"), (written, "<s>ab")):
        rendered = renders.render(Prompt(id="a", text=text))
        assert rendered.tokens == (start, *plain)
        assert rendered.text == "<s>ab" == tokenizer.decode(rendered.tokens)
    chat = template.render(Prompt(id="a", text="", messages=CONVERSATION[:1]))
    assert start not in chat.tokens  # this chat template writes none, so there is none
    assert template.encode_completion("ab", 1) == (*plain, 1)


def test_prompts_without_tokens_or_with_too_many_are_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ValueError, match="prompt 'a': it has no tokens"):
        Template(tokenizer).render(Prompt(id="a", text=""))
    template = Template(tokenizer, max_prompt_tokens=4)
    template.render(Prompt(id="a", text="1234"))
    with pytest.raises(PromptTooLong, match="prompt 'b': 5 tokens, and max_prompt_tokens is 4"):
        template.render(Prompt(id="b", text="12345"))


def test_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """The tiny model has one that is off by default: it is said how to have it."""
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"model\.options = \{ chat = true \}, from Python"):
        Template(tokenizer, chat=True)
    tokenizer.name_or_path = "some/base"
    with pytest.raises(ValueError, match="no chat template; set chat = false"):
        Template(tokenizer, chat=True)
    template = Template(tokenizer)
    with pytest.raises(ValueError, match="no chat template; set chat = false"):
        template.render(Prompt(id="a", text="", messages=CONVERSATION[:1]))


def test_a_system_message_without_a_chat_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="needs a chat"):
        Template(tokenizer, chat=False, system="be brief")
    with pytest.raises(ValueError, match="cannot carry a system message"):
        Template(tokenizer, system="be brief").render(Prompt(id="a", text="2+3="))


def test_what_a_template_refuses_is_passed_on(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"roles system, user: System role not supported"):
        Template(tokenizer, chat=True, system="be brief")


def test_a_completion_ends_with_the_end_token_once(tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(tokenizer)
    expected = (*tokenizer("5").input_ids, 1)
    assert template.encode_completion("5", 1) == expected
    written = Template(tokenizer, special_tokens="tokens")
    assert written.encode_completion("5<|end|>", 1) == expected
    assert template.encode_completion("", 1) == (1,)


def test_the_loss_is_on_what_the_assistant_wrote(tokenizer: PreTrainedTokenizerFast) -> None:
    [(tokens, mask)] = Template(tokenizer).render_conversation(CONVERSATION)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(tokens) == text
    learned = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
    assert tokenizer.decode(learned) == "2<|end|><think>x</think>4<|end|>"
    # The tokens before a turn are those of the prompt that asks for it.
    prompt = Template(tokenizer).render(Prompt(id="a", text="", messages=CONVERSATION[:3]))
    assert tokens[: len(prompt.tokens)] == prompt.tokens
    assert mask[len(prompt.tokens)]
    assert not mask[len(prompt.tokens) - 1]


def test_what_a_template_writes_after_the_end_token_is_not_learned(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "'<|end|>\\n'")
    [(tokens, mask)] = Template(tokenizer).render_conversation(CONVERSATION[:2])
    learned = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
    assert tokenizer.decode(learned) == "2<|end|>"
    assert tokenizer.decode(tokens).endswith("2<|end|>\n")


def test_a_conversation_may_begin_with_the_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(tokenizer)
    template.prepare(conversations=[CONVERSATION[1:2]])
    [(tokens, mask)] = template.render_conversation(CONVERSATION[1:2])
    assert tokenizer.decode(tokens) == "<|assistant|>2<|end|>"
    assert mask == (False, True, True)


def test_a_conversation_gets_the_system_message_too(tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(tokenizer, system="be brief")
    [(tokens, _)] = template.render_conversation(CONVERSATION)
    assert tokenizer.decode(tokens).startswith("<|system|>be brief<|end|><|user|>1+1=")


def test_a_template_that_rewrites_earlier_turns_makes_more_rows(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Every turn is learned once, thoughts and all, behind the prompt that will ask for it."""
    tokenizer.chat_template = FORGETFUL
    template = Template(tokenizer)
    assert len(template.render_conversation(CONVERSATION)) == 1  # the thought is in the last turn
    rows = template.render_conversation(CONVERSATION[2:] + CONVERSATION[:2])
    texts = [
        (
            tokenizer.decode([t for t, own in zip(*row, strict=True) if not own]),
            tokenizer.decode([t for t, own in zip(*row, strict=True) if own]),
        )
        for row in rows
    ]
    asked = "<|user|>2+2=<|end|><|assistant|>"
    assert texts == [
        (asked, "<think>x</think>4<|end|>"),
        (f"{asked}4<|end|><|user|>1+1=<|end|><|assistant|>", "2<|end|>"),
    ]


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.length }}{{ '<|' + m['role'] + '|>' + m['content'] }}"
        "<|end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="writes a prompt differently once it is answered"):
        Template(tokenizer).render_conversation(CONVERSATION)


@pytest.mark.parametrize(
    ("learn", "learned"),
    [
        ("assistant", "2<|end|><think>x</think>4<|end|>"),
        ("last", "<think>x</think>4<|end|>"),
        (
            "all",
            "1+1=<|end|><|assistant|>2<|end|><|user|>2+2=<|end|><|assistant|>"
            "<think>x</think>4<|end|>",
        ),
    ],
)
def test_what_is_learned_can_be_chosen(
    tokenizer: PreTrainedTokenizerFast, learn: LearnedPart, learned: str
) -> None:
    """The text is the same; of all tokens, nothing predicts the first."""
    template = Template(tokenizer)
    template.prepare(conversations=[CONVERSATION], learn=learn)
    [(tokens, mask)] = template.render_conversation(CONVERSATION, learn=learn)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    own = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
    assert tokenizer.decode(own) == learned


def test_a_conversation_that_teaches_nothing_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ValueError, match="no assistant turn"):
        Template(tokenizer).render_conversation(CONVERSATION[:1])
    with pytest.raises(ValueError, match="never learn to stop"):
        Template(tokenizer, end_tokens=(50,)).render_conversation(CONVERSATION)


def test_decoding_drops_end_and_pad_behind_and_keeps_tags(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = Template(tokenizer)
    text = "<think>2 + 3</think>\n<answer>5</answer>"
    tokens = tokenizer(text).input_ids
    assert template.decode([*tokens, 1, 0, 0]) == text
    assert template.decode(tokens) == text
    assert template.decode([1, *tokens, 1]) == f"<|end|>{text}"  # only behind
    assert template.decode([]) == template.decode([1]) == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*CHARACTERS, *TAGS])).map("".join))
def test_a_completion_survives_the_round_trip(text: str) -> None:
    template = Template(build_tokenizer())
    assert template.decode(template.encode_completion(text, 1)) == text


@pytest.mark.parametrize("end", ["<|end|>", "<|end|>\\n"])
def test_messages_that_follow_a_turn_are_what_the_template_writes_there(end: str) -> None:
    """Prompt, sampled tokens and reply are together the prompt of the longer conversation."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", f"'{end}'")
    template = Template(tokenizer, chat=True)
    asked, answer, told = (
        {"role": role, "content": text}
        for role, text in (("user", "2+3="), ("assistant", "6"), ("user", "no <|end|>"))
    )
    prompt = template.render(Prompt(id="0", text="", messages=(asked,)))
    longer = template.render(Prompt(id="0", text="", messages=(asked, answer, told)))
    sampled = template.encode_completion("6", tokenizer.convert_tokens_to_ids("<|end|>"))
    assert (*prompt.tokens, *sampled, *template.encode_reply([told])) == longer.tokens
    assert template.encode_reply("no <|end|>") == template.encode_reply([told])
    # What text spells is text: no end token, and without a chat nothing before or behind it.
    spelled = Template(tokenizer).encode_reply("no <|end|>")
    assert not {*spelled} & template.end_tokens
    assert template.decode(spelled) == "no <|end|>"
