"""``posttrain.Policy``: loaded once, it answers lists, streams whole characters, and scores."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_models import SAID, taught_model
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.text_pieces import TextPieces
from posttrain.stages.loaded.loaded_policy import LoadedPolicy as Policy

CHAT = [{"role": "user", "content": "Speak."}]
WARM: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_model(tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Policy]:
    with posttrain.Policy(folder) as made:
        yield made


def test_it_says_what_it_was_taught_to_text_and_to_messages(policy: Policy) -> None:
    (text,) = policy.generate("Speak.", max_new_tokens=64)
    (chat,) = policy.generate(CHAT, max_new_tokens=64)
    assert text.text == chat.text == SAID
    assert text.tokens == chat.tokens
    assert text.stop_reason == "stop"
    assert posttrain.generate(policy.name, "Speak.", max_new_tokens=64)[0] == text


def test_a_prompt_is_answered_the_same_in_any_company(policy: Policy) -> None:
    """By its tokens and the seed; the same prompt twice is two samples of it."""
    prompts = ["Speak.", "Sing a song, please.", CHAT, "1+1="]
    together = policy.generate(prompts, num_samples=2, **WARM)
    assert [answer.group for answer in together] == [0, 0, 1, 1, 2, 2, 3, 3]
    for place in (1, 3):
        alone = policy.generate(prompts[place], num_samples=2, **WARM)
        kept = together[2 * place : 2 * place + 2]
        assert [each.tokens for each in alone] == [each.tokens for each in kept]
        assert torch.allclose(torch.tensor(alone[0].logprobs), torch.tensor(kept[0].logprobs))
    four = policy.generate("Speak.", num_samples=4, **WARM)  # prompts 0 and 2 are the same tokens
    same = [*together[:2], *together[4:6]]
    assert [each.tokens for each in same] == [each.tokens for each in four]
    assert len({each.tokens for each in four}) > 1
    other = policy.generate("Speak.", num_samples=4, **{**WARM, "seed": 4})
    assert [each.tokens for each in other] != [each.tokens for each in four]


def test_prompts_are_sampled_in_one_call(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    generate = LocalEngine.generate

    def counted(self: LocalEngine, prompts: Any, *given: Any, **more: Any) -> Any:
        calls.append(len(prompts))
        return generate(self, prompts, *given, **more)

    monkeypatch.setattr(LocalEngine, "generate", counted)
    policy.generate(["a", "bc", "def"], max_new_tokens=2)
    assert calls == [3]


@pytest.mark.parametrize("options", [{}, {"stop": ["! s"]}, WARM, {**WARM, "top_k": 5}])
def test_a_stream_is_the_answer_in_whole_characters(
    policy: Policy, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 64, **options}
    pieces = list(policy.stream("Speak.", **options))
    (answer,) = policy.generate("Speak.", **options)
    assert "".join(pieces) == answer.text
    if "temperature" not in options:
        assert "�" not in "".join(pieces)
        assert "🎉" in pieces
        assert len(pieces) > 8


def test_a_sample_of_several_steps_is_the_rollout_of_the_engine(policy: Policy) -> None:
    """Also where samples end one after the other, and the rest goes on."""
    options = {**WARM, "max_new_tokens": 40, "temperature": 1.8}
    steps = policy.steps("Speak.", num_samples=5, **options)
    drawn = []
    while not steps.done:
        drawn += steps.step()
    expected = policy.generate("Speak.", num_samples=5, **options)
    assert len({len(each.tokens) for each in expected}) > 1
    for ours, theirs in zip(steps.rollouts(), expected, strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        assert ours.stop_reason == theirs.stop_reason
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs))
    for number, each in enumerate(expected):
        assert "".join(t.piece for t in drawn if t.sample == number) == each.text


def test_a_model_that_cannot_be_cached_is_stepped_all_the_same(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.models.cache import UnknownMemoryError
    from posttrain.rollout.engines import stepwise

    expected = policy.steps("Speak.", num_samples=2, **WARM)
    while not expected.done:
        expected.step()

    def unknown(*_: object, **__: object) -> Any:
        raise UnknownMemoryError("model", "a state")

    monkeypatch.setattr(stepwise, "prefill", unknown)
    steps = policy.steps("Speak.", num_samples=2, **WARM)
    while not steps.done:
        steps.step()
    assert [r.tokens for r in steps.rollouts()] == [r.tokens for r in expected.rollouts()]


def test_stop_strings_are_held_back_only_as_long_as_they_may_come() -> None:
    pieces = TextPieces(lambda codes: bytes(codes).decode(errors="replace"), stop=["aab", "日本"])
    said = [pieces.add(code) for code in b"xaaab"]
    assert "".join(said) == pieces.text == "xa"
    assert pieces.stopped
    pieces = TextPieces(lambda codes: bytes(codes).decode(errors="replace"), stop=["日本"])
    assert [pieces.add(code) for code in "日!".encode()] == ["", "", "", "日!"]
    assert [pieces.add(code) for code in "日".encode()] == ["", "", ""]
    assert pieces.end() == "日"
    pieces = TextPieces(lambda codes: bytes(codes).decode(errors="replace"))
    assert [pieces.add(code) for code in b"\xe6\x97a\xe6"] == ["", "", "�a", ""]
    assert pieces.end() == "�"


def test_scores_are_the_log_probs_of_the_model(policy: Policy) -> None:
    """Of a text, of a completion, and of what was sampled by its own tokens; against plain
    transformers.
    """
    plain = AutoModelForCausalLM.from_pretrained(policy.name).eval()

    def expected(before: list[int], tokens: list[int]) -> list[float]:
        row = torch.tensor([[*before, *tokens]])
        logprobs = plain(row).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, row[0, 1:, None])[:, 0]
        return chosen[len(before) - 1 :].tolist()

    tokenizer = policy.tokenizer
    text = policy.score("ab é")
    tokens = tokenizer("ab é").input_ids
    assert text.tokens == tuple(tokens[1:])  # nothing stands before the first
    assert text.logprobs == pytest.approx(expected(tokens[:1], tokens[1:]), abs=1e-4)
    assert text.sum == pytest.approx(sum(text.logprobs))
    assert text.perplexity == pytest.approx(float(torch.tensor(text.logprobs).mean().neg().exp()))

    prompt = list(policy.prompt("Speak.").tokens)
    said = tokenizer(SAID).input_ids
    pair, ended = policy.score(("Speak.", SAID)), policy.score(("Speak.", SAID), end=True)
    assert pair.logprobs == pytest.approx(expected(prompt, said), abs=1e-4)
    assert ended.tokens == (*pair.tokens, tokenizer.eos_token_id)
    assert pair.text == SAID
    assert pair.perplexity < 1.5 < policy.score(("Speak.", "something else")).perplexity

    rollouts = policy.generate(["Speak.", "Go."], num_samples=2, **WARM)
    for rollout, scored in zip(rollouts, policy.score(rollouts, temperature=1.5), strict=True):
        assert scored.tokens == rollout.tokens
        assert scored.logprobs == pytest.approx(rollout.logprobs, abs=1e-4)
    (chat,) = policy.score([[*CHAT, {"role": "assistant", "content": SAID}]])
    assert chat.sum == pytest.approx(ended.sum, abs=1e-3)


def test_scores_do_not_depend_on_company(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab cd", "a longer text of several words", "xyz", "no"]
    together = policy.score(texts)
    monkeypatch.setattr("posttrain.stages.loaded.text_scores.PASS_TOKENS", 1)
    for text, scored in zip(texts, together, strict=True):
        assert policy.score(text).logprobs == pytest.approx(scored.logprobs, abs=1e-5)


def test_mistakes_are_told(policy: Policy) -> None:
    with pytest.raises(ValueError, match="that is not empty, got"):
        policy.generate([])
    with pytest.raises(ValueError, match="expected a text or messages"):
        policy.generate([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected a text or messages"):
        policy.generate([{"content": "no role"}])
    with pytest.raises(ValueError, match="stop: expected a list of texts, got 'ab'"):
        policy.generate("a", stop="ab")
    with pytest.raises(ValueError, match="exceed the model's context length of 256"):
        list(policy.stream("a", max_new_tokens=500))
    with pytest.raises(ValueError, match="nothing stands before it"):
        policy.score("a")
    with pytest.raises(ValueError, match="no tokens to score; end=True"):
        policy.score(("a", ""))
    with pytest.raises(ValueError, match="the model's context length is 256"):
        policy.score("a b" * 300)


def test_a_closed_policy_says_so(folder: Path) -> None:
    with Policy(folder) as made:
        made.generate("a", max_new_tokens=1)
    assert "closed" in repr(made)
    made.close()
    for ask in (made.generate, made.score, lambda text: next(made.stream(text))):
        with pytest.raises(ValueError, match=r"closed.*make another one"):
            ask("ab")


def test_threads_wait_for_their_turn(policy: Policy) -> None:
    expected = policy.generate("Speak.", num_samples=2, **WARM)
    found: list[Any] = []

    def ask() -> None:
        found.append(policy.generate("Speak.", num_samples=2, **WARM))
        found.append("".join(policy.stream("Speak.", **WARM)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(each in (expected, expected[0].text) for each in found)


def test_what_is_shown_of_answers_is_short(policy: Policy) -> None:
    (answer,) = policy.generate("Speak.", max_new_tokens=64)
    count = len(answer.tokens)
    assert repr(answer) == f"Rollout('Speak.' → {SAID!r}, {count} tokens, stop)"
    answers = policy.generate(["Speak. " * 12], num_samples=2, max_new_tokens=64)
    assert len(repr(answers)) < 500
