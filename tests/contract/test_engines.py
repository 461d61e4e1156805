"""What every engine keeps: its log-probs are the learner's, and a seed decides every token."""

import contextlib
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
import vllm_engines
from distributed.ray_session import ray_actors, ray_replicas  # noqa: F401 - fixtures
from distributed.replicas import pool_of
from exact_arithmetic import float64_throughout
from models.families import VOCABULARY, build
from rollout.cases import END, drawn, largest_error, ragged, spell, whole_logits
from transformers import GenerationConfig

from posttrain.data.template import Template
from posttrain.fast.score import score_tokens
from posttrain.models.load import load_policy
from posttrain.models.stops import Decode
from posttrain.registry import resolve
from posttrain.rollout.engines import ENGINES, NativeEngine, ScriptedEngine, TransformersEngine
from posttrain.types import Batch, Part, Prompt, Rollout, Sampling, Turn

REAL = {"native": NativeEngine, "transformers": TransformersEngine}
# mistral and gemma3 attend in windows of 4
FAMILIES = ["llama", "qwen2", "qwen3_moe", "gpt2", "mistral", "gemma3"]
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=12),
    "hot": Sampling(max_new_tokens=12, temperature=1.7),
    "top-k": Sampling(max_new_tokens=12, temperature=0.7, top_k=5),
    "top-p": Sampling(max_new_tokens=12, temperature=0.8, top_p=0.7),
    "both": Sampling(max_new_tokens=12, temperature=0.6, top_k=9, top_p=0.9),
    "greedy": Sampling(max_new_tokens=12, temperature=0.0),
}
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-9}
PROMPTS = ragged(3, 9, 1, 5, 9)


@pytest.fixture(params=REAL)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def scripted(model: Any, *, decode: Decode = spell, **options: Any) -> ScriptedEngine:
    """Says up to 40 tokens that look random and depend on all that stands before them."""

    def script(prompt: Prompt, sample: int) -> str:
        drawn = random.Random(repr((prompt.tokens, prompt.text, sample)))
        return spell([drawn.choice(OTHERS) for _ in range(drawn.randrange(1, 41))])

    def tokens(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    return ScriptedEngine(script, encode=tokens, decode=decode, end_token=END)


OTHERS = [token for token in range(VOCABULARY) if token != END]
# What a script cannot keep, by test (or by case of one), and why.
NO_MODEL = "a script has no model"
NOT_SCRIPTED = {
    "test_logprobs_are_of_the_distribution_really_sampled": NO_MODEL,
    "test_greedy_is_what_generate_says_of_one_prompt_alone": NO_MODEL,
    "test_a_seed_decides_every_token": "another seed changes nothing in a script",
    "test_stop_reasons_and_the_end_token": "a script has one end token",
    "test_an_end_at_the_last_allowed_token_is_a_stop": "a script has one end token",
    "test_one_new_token": NO_MODEL,
    "test_weights_changed_in_place_reach_the_engine": NO_MODEL,
    "test_frequencies_match_probabilities": NO_MODEL,
    "test_the_models_own_generation_defaults_have_no_say": NO_MODEL,
    "test_the_mode_of_every_module_is_given_back": NO_MODEL,
    "test_impossible_requests_say_what_to_do[scripted-no tokens]": "a script needs no tokens",
    "test_impossible_requests_say_what_to_do[scripted-little room]": NO_MODEL,
    "test_impossible_requests_say_what_to_do[scripted-no room]": NO_MODEL,
    "test_the_last_position_of_the_context_is_usable": NO_MODEL,
    "test_a_diverged_model_is_not_sampled_from_in_silence": NO_MODEL,
    "test_a_reply_is_read_and_the_policy_goes_on": NO_MODEL,
    "test_a_conversation_that_leaves_no_room_is_over": NO_MODEL,
    "test_a_part_of_a_call_draws_what_the_whole_draws": "a script draws nothing",
}


# A server computes in float32, and has its own copy of the weights: test_real_vllm.py changes them.
IN_FLOAT64 = "the bound is one of float64"
NOT_VLLM = {
    "test_one_new_token": IN_FLOAT64,
    "test_the_last_position_of_the_context_is_usable": IN_FLOAT64,
    "test_weights_changed_in_place_reach_the_engine": "a sync brings them: test_syncs.py",
    "test_a_diverged_model_is_not_sampled_from_in_silence": "a sync brings them: test_vllm.py",
    "test_the_mode_of_every_module_is_given_back": "it does not sample from that module",
}


def same(first: list[list[Rollout]], second: list[list[Rollout]]) -> bool:
    """Equal to the last digit."""
    return first == second


def nearly(first: list[list[Rollout]], second: list[list[Rollout]]) -> bool:
    """Equal but for rounding: a server batches requests as they come."""
    known = [
        torch.tensor([p for g in each for r in g for p in r.logprobs]) for each in (first, second)
    ]
    bare = [
        [[(r.prompt, r.group, r.tokens, r.mask, r.text, r.stop_reason) for r in g] for g in each]
        for each in (first, second)
    ]
    return bare[0] == bare[1] and torch.allclose(*known, rtol=0, atol=1e-4, equal_nan=True)


def begun(answers: list[list[Rollout]]) -> list[list[Rollout]]:
    """The first turns alone."""
    return [[dataclasses.replace(r, turns=r.turns[:1]) for r in group] for group in answers]


# What several engines in processes of their own cannot keep, by test, and why.
OWN_WEIGHTS = "its engines have weights of their own: tests/contract/test_syncs.py"
NOT_POOLED = {
    "test_weights_changed_in_place_reach_the_engine": OWN_WEIGHTS,
    "test_a_diverged_model_is_not_sampled_from_in_silence": OWN_WEIGHTS,
    "test_the_mode_of_every_module_is_given_back": "the learner's modules are not touched",
}
SKIPPED = {"scripted": NOT_SCRIPTED, "pool": NOT_POOLED, "ray": NOT_POOLED, "vllm": NOT_VLLM}
POOLS = ["pool", pytest.param("ray", marks=pytest.mark.cluster)]
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)


def exactly(request: pytest.FixtureRequest) -> bool:
    """Whether a test has even what a model computes in float32 computed in float64."""
    asked = request.node.callspec.params.get("dtype") is torch.float64
    return asked or "float64_throughout" in request.fixturenames


@pytest.fixture(params=[*REAL, "scripted", *POOLS, VLLM])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes an engine of the kind under test."""
    names = (request.node.originalname, request.node.name)
    skipped = SKIPPED.get(request.param, {})
    reason = next((skipped[name] for name in names if name in skipped), None)
    if request.param == "vllm" and exactly(request):
        reason = IN_FLOAT64
    if skipped is NOT_POOLED and exactly(request):
        reason = "all of its arithmetic is float64 in the thread of the test alone"
    if reason is not None:
        pytest.skip(reason)
    pools: list[Any] = []
    if request.param == "vllm":
        monkeypatch.setitem(globals(), "build", partial(build, wide=True))
        monkeypatch.setitem(globals(), "same", nearly)

    def make_one(model: Any, **options: Any) -> Any:
        options = {"end_tokens": (END,), "decode": spell, **options}
        if request.param in REAL:
            return REAL[request.param](model, **options)
        if request.param == "scripted":
            return scripted(model, **options)
        if request.param == "vllm":
            pools.append(vllm_engines.engine_of(model, **options))
            return pools[-1]
        given = request.getfixturevalue("ray_replicas")() if request.param == "ray" else {}
        pools.append(pool_of(NativeEngine, model, **given, **options))
        return pools[-1]

    yield make_one
    for pool in pools:
        pool.close()


def test_the_table_names_every_engine_of_this_suite() -> None:
    """The table's are the real ones; the scripted one is made in Python."""
    assert set(ENGINES) == {*REAL, "vllm"}
    left_out = {name.partition("[")[0] for table in SKIPPED.values() for name in table}
    assert left_out < set(globals())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_of_the_distribution_really_sampled(
    make: Callable[..., Any], family: str, dtype: torch.dtype
) -> None:
    model = build(family, dtype=dtype)
    exact = float64_throughout if dtype == torch.float64 else contextlib.nullcontext
    for label, sampling in SAMPLINGS.items():
        with exact():
            answers = make(model).generate(PROMPTS, sampling, num_samples=3, seed=11)
            error = largest_error(model, PROMPTS, answers=answers, sampling=sampling)
        assert error <= BOUNDS[dtype], (label, error)


def test_the_learner_agrees_on_the_tiny_model(name: str) -> None:
    policy = load_policy("tiny", seed=5)
    template = Template(policy.tokenizer)
    prompts = [template.render(Prompt(id=text, text=text)) for text in ("2+3=", "sort: 9 1 4")]
    sampling = Sampling(max_new_tokens=16, temperature=0.9, top_k=40, top_p=0.95)
    make = resolve({"name": name, "max_sequences": 5}, ENGINES, kind="engine")
    engine = make(policy, template.decode)
    answers = engine.generate(prompts, sampling, num_samples=4, seed=1)
    for prompt, completions in zip(prompts, answers, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*prompt.tokens, *completion.tokens]])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt.tokens)
            options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
            scores = score_tokens(policy.model, Batch(tokens=tokens, mask=mask), **options)
            learner = scores.logprobs[mask].detach()
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), learner, rtol=0, atol=1e-4
            )
            assert completion.text == template.decode(completion.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_draw_the_same_tokens(family: str) -> None:
    model = build(family)
    native, other = (
        kind(model, end_tokens=(END,), decode=spell).generate(
            PROMPTS, SAMPLINGS["both"], num_samples=4, seed=3
        )
        for kind in REAL.values()
    )
    assert drawn(native) == drawn(other)
    assert [c.text for cs in native for c in cs] == [c.text for cs in other for c in cs]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_says_of_one_prompt_alone(
    make: Callable[..., Any], family: str
) -> None:
    model = build(family)
    answers = make(model).generate(PROMPTS, SAMPLINGS["greedy"], num_samples=2, seed=0)
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt.tokens])
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=12, eos_token_id=END, pad_token_id=END
        )
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=settings
        )[0, len(prompt.tokens) :].tolist()
        assert [list(completion.tokens) for completion in completions] == [expected] * 2


def test_a_seed_decides_every_token(make: Callable[..., Any]) -> None:
    engine = make(build("llama"))
    first, again, other = (
        engine.generate(PROMPTS, SAMPLINGS["plain"], num_samples=3, seed=seed) for seed in (8, 8, 9)
    )
    assert same(first, again)
    assert drawn(first) != drawn(other)
    assert len({tokens for group in drawn(first) for tokens in group}) > 10  # nor are rows alike


def test_torch_random_state_is_not_touched(make: Callable[..., Any]) -> None:
    engine = make(build("llama"))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    engine.generate(PROMPTS, SAMPLINGS["plain"], num_samples=2, seed=4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_sequence_does_not_depend_on_its_company(make: Callable[..., Any], family: str) -> None:
    model, sampling = build(family), SAMPLINGS["both"]
    whole = drawn(make(model).generate(PROMPTS, sampling, num_samples=2, seed=2))
    for most in (1, 4):
        parts = make(model, max_sequences=most)
        assert drawn(parts.generate(PROMPTS, sampling, num_samples=2, seed=2)) == whole
    # Other prompts, longer and shorter, stand beside the second one.
    others = [*ragged(20), PROMPTS[1], *ragged(2, 1)]
    beside = drawn(make(model).generate(others, sampling, num_samples=2, seed=2))
    assert beside[1] == whole[1]


def test_a_longer_limit_only_adds_tokens(make: Callable[..., Any]) -> None:
    engine = make(build("gpt2"), end_tokens=())
    short, long = (
        drawn(engine.generate(PROMPTS, Sampling(max_new_tokens=n), num_samples=2, seed=6))
        for n in (5, 19)
    )
    assert [[tokens[:5] for tokens in group] for group in long] == short


def test_stop_reasons_and_the_end_token(make: Callable[..., Any]) -> None:
    # END is also the pad token of these models, and stands inside and at the end of prompts.
    assert build("llama").config.pad_token_id == END
    prompts = [*PROMPTS, Prompt(id="ends with END", text="", tokens=(5, END))]
    engine = make(build("llama"), end_tokens=(END, 8))
    answers = engine.generate(prompts, SAMPLINGS["hot"], num_samples=8, seed=0)
    completions = [completion for group in answers for completion in group]
    assert {completion.stop_reason for completion in completions} == {"stop", "length"}
    assert {c.tokens[-1] for c in completions if c.stop_reason == "stop"} == {END, 8}
    for completion in completions:
        ended = completion.stop_reason == "stop"
        kept = completion.tokens[:-1] if ended else completion.tokens
        assert not set(kept) & {END, 8}
        assert ended or len(completion.tokens) == 12
        assert completion.text == spell(kept)


def test_an_end_at_the_last_allowed_token_is_a_stop(make: Callable[..., Any]) -> None:
    engine = make(build("llama"), end_tokens=range(VOCABULARY))
    for limit in (1, 7):  # with every token an end token, each completion is one token long
        ((completion,),) = engine.generate(
            PROMPTS[:1], Sampling(max_new_tokens=limit), num_samples=1, seed=0
        )
        assert (len(completion.tokens), completion.stop_reason) == (1, "stop")
        assert completion.text == ""


WAYS = {**REAL, "native, in parts": partial(NativeEngine, slots=False)}
SPELLED = [b"a", b"b", *(bytes([half]) for half in "é".encode()), b"ba"]


def utf8(tokens: Sequence[int]) -> str:
    """Text of tokens that are a character, half of one, or two."""
    return b"".join(SPELLED[token % 5] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("stop", [("ab",), ("aab", "bbb"), ("é",), ("aé", "ba")])
@pytest.mark.parametrize("way", [*WAYS, "scripted", VLLM])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    way: str, stop: tuple[str, ...]
) -> None:
    kind = {**WAYS, "scripted": scripted, "vllm": vllm_engines.engine_of}[way]
    model = build("llama", wide=way == "vllm")
    with contextlib.closing(kind(model, end_tokens=(END,), decode=utf8)) as engine:
        _completes_stop_strings(engine, stop)


def _completes_stop_strings(engine: Any, stop: tuple[str, ...]) -> None:
    free = Sampling(max_new_tokens=40)
    # The first prompt ends in an "a": what stands in a prompt completes no string.
    prompts = [Prompt(id="a", text="", tokens=(1, 5)), *PROMPTS]
    whole, cut = (
        [c for group in engine.generate(prompts, sampling, num_samples=8, seed=4) for c in group]
        for sampling in (free, dataclasses.replace(free, stop=stop))
    )
    assert utf8(prompts[0].tokens)[-1] == "a"
    assert "b" in {utf8(completion.tokens[:1]) for completion in whole[:8]}
    assert {"stop_string", "stop"} <= {completion.stop_reason for completion in cut}
    for long, short in zip(whole, cut, strict=True):
        said = long.tokens[:-1] if long.stop_reason == "stop" else long.tokens
        texts = [utf8(said[:number]) for number in range(len(said) + 1)]
        first = next((n for n, text in enumerate(texts) if any(s in text for s in stop)), None)
        if first is None:
            assert (short.text, short.stop_reason) == (long.text, long.stop_reason)
        else:
            place = min(texts[first].find(s) for s in stop if s in texts[first])
            assert (short.text, short.stop_reason) == (texts[first][:place], "stop_string")
        assert short.tokens == long.tokens[:first]  # all that was sampled, and nothing behind it
        assert short.logprobs == pytest.approx(long.logprobs[:first], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_string_ends_the_work_too(way: str) -> None:
    model, passes = build("llama"), []
    handle = model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    engine = WAYS[way](model, end_tokens=(), decode=lambda tokens: "x" * len(tokens))
    for stop in ((), ("xxx",)):
        passes.clear()
        sampling = Sampling(max_new_tokens=40, stop=stop)
        engine.generate(PROMPTS[:1], sampling, num_samples=1, seed=0)
        assert (len(passes) < 10) == bool(stop)
    handle.remove()


@pytest.mark.usefixtures("float64_throughout")
def test_one_new_token(make: Callable[..., Any]) -> None:
    model, sampling = build("qwen2"), Sampling(max_new_tokens=1)
    answers = make(model).generate(PROMPTS, sampling, num_samples=2, seed=0)
    assert {len(completion.tokens) for group in answers for completion in group} == {1}
    assert largest_error(model, PROMPTS, answers=answers, sampling=sampling) < 5e-6


@pytest.mark.usefixtures("float64_throughout")
def test_weights_changed_in_place_reach_the_engine(make: Callable[..., Any]) -> None:
    model = build("llama")
    engine, sampling = make(model), SAMPLINGS["plain"]
    before = engine.generate(PROMPTS, sampling, num_samples=2, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    engine.version = 1
    after = engine.generate(PROMPTS, sampling, num_samples=2, seed=0)
    assert {completion.version for group in before for completion in group} == {0}
    assert {completion.version for group in after for completion in group} == {1}
    assert largest_error(model, PROMPTS, answers=after, sampling=sampling) < 5e-6
    assert largest_error(model, PROMPTS, answers=before, sampling=sampling) > 0.1


def test_frequencies_match_probabilities(make: Callable[..., Any]) -> None:
    model, sampling = build("gpt2"), Sampling(max_new_tokens=1, temperature=1.5, top_k=12)
    prompt = PROMPTS[1]
    (completions,) = make(model).generate([prompt], sampling, num_samples=4000, seed=13)
    logits = whole_logits(model, prompt, completions[0])[0] / 1.5
    kept = logits >= logits.topk(12).values[-1]
    probabilities = logits.masked_fill(~kept, -torch.inf).softmax(-1).tolist()
    counts = Counter(completion.tokens[0] for completion in completions)
    assert all(probabilities[token] > 0 for token in counts)
    square = sum((counts[t] - 4000 * p) ** 2 / (4000 * p) for t, p in enumerate(probabilities) if p)
    assert 1.6 < square < 33.1  # 0.05 % and 99.95 % points of chi-square with 11 degrees


def test_the_models_own_generation_defaults_have_no_say(make: Callable[..., Any]) -> None:
    model, sampling = build("llama"), SAMPLINGS["plain"]
    expected = make(model).generate(PROMPTS, sampling, num_samples=2, seed=0)
    own = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=1,
        repetition_penalty=9.0,
        suppress_tokens=[t for tokens in drawn(expected)[0] for t in tokens],
        min_new_tokens=11,
        num_beams=2,
        max_length=4,
        eos_token_id=9,
    )
    model.generation_config = own
    assert same(make(model).generate(PROMPTS, sampling, num_samples=2, seed=0), expected)
    assert model.generation_config is own


def test_the_mode_of_every_module_is_given_back(make: Callable[..., Any]) -> None:
    model = build("gpt2", dtype=torch.float32)
    expected = make(model).generate(PROMPTS, SAMPLINGS["plain"], num_samples=2, seed=0)
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    answers = make(model).generate(PROMPTS, SAMPLINGS["plain"], num_samples=2, seed=0)
    assert answers == expected  # GPT-2 has dropout: had it been on, the tokens would differ
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="too long"):
        make(model, decode=_fail).generate(PROMPTS, SAMPLINGS["plain"], num_samples=1, seed=0)
    assert [module.training for module in model.modules()] == modes


def _fail(tokens: Any) -> str:
    raise ValueError("too long")


def test_one_sample_and_no_prompts(make: Callable[..., Any]) -> None:
    engine = make(build("llama"))
    answers = engine.generate(PROMPTS, SAMPLINGS["plain"], num_samples=1, seed=0)
    assert [len(group) for group in answers] == [1] * len(PROMPTS)
    assert engine.generate([], SAMPLINGS["plain"], num_samples=3, seed=0) == []


@pytest.mark.parametrize(
    ("prompt", "num_samples", "message"),
    [
        (Prompt(id="a", text="x"), 1, r"prompt 'a': it has no tokens.*render"),
        (Prompt(id="b", text="", tokens=(1,) * 53), 1, r"'b'.*53.*max_new_tokens=12.*64.*to 11 or"),
        (Prompt(id="c", text="", tokens=(1,) * 64), 1, r"'c'.*64.*max_new.*64; leave the prompt"),
        (PROMPTS[0], 0, r"num_samples: must be at least 1, got 0"),
    ],
    ids=["no tokens", "little room", "no room", "no samples"],
)
def test_impossible_requests_say_what_to_do(
    make: Callable[..., Any], prompt: Prompt, num_samples: int, message: str
) -> None:
    engine = make(build("llama"))
    with pytest.raises(ValueError, match=message):
        engine.generate([*PROMPTS, prompt], SAMPLINGS["plain"], num_samples=num_samples, seed=0)


def test_the_last_position_of_the_context_is_usable(make: Callable[..., Any]) -> None:
    model, sampling, prompts = build("gpt2"), SAMPLINGS["plain"], ragged(52, 3)
    answers = make(model, end_tokens=()).generate(prompts, sampling, num_samples=2, seed=0)
    assert largest_error(model, prompts, answers=answers, sampling=sampling) < 5e-6


def test_a_diverged_model_is_not_sampled_from_in_silence(make: Callable[..., Any]) -> None:
    model = build("llama")
    engine = make(model)
    engine.generate(PROMPTS, SAMPLINGS["plain"], num_samples=1, seed=0)
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN.*learning rate"):
        engine.generate(PROMPTS, SAMPLINGS["plain"], num_samples=1, seed=0)


def numbers_of(rollout: Rollout, number: int) -> Turn | None:
    """Two replies, which depend on what was said; then the rollout is over."""
    if len(rollout.turns) > 3:
        return None
    return Turn(tokens=(2 + len(rollout.tokens) % 5, 3), text="")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_reply_is_read_and_the_policy_goes_on(make: Callable[..., Any], family: str) -> None:
    """Log-probs of every turn are those of the whole sequence; what was replied is not sampled."""
    model, sampling = build(family), SAMPLINGS["plain"]
    engine = make(model)
    short = dataclasses.replace(sampling, max_new_tokens=3)
    answers = engine.generate(PROMPTS, short, num_samples=2, seed=11, reply=numbers_of)
    assert drawn(answers) == drawn(
        engine.generate(PROMPTS, short, num_samples=2, seed=11, reply=numbers_of)
    )
    for group, (prompt, rollouts) in enumerate(zip(PROMPTS, answers, strict=True)):
        for rollout in rollouts:
            assert (rollout.prompt, rollout.group) == (prompt, group)
            assert [turn.sampled for turn in rollout.turns] == [True, False, True, False, True]
            assert rollout.mask.count(False) == 4
            everything = torch.tensor(rollout.logprobs).double()
            logits = whole_logits(model, prompt, rollout)
            naive = (
                logits.double()
                .log_softmax(-1)
                .gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]
            )
            mask = torch.tensor(rollout.mask)
            torch.testing.assert_close(everything[mask], naive[mask], rtol=0, atol=1e-4)
    plain = engine.generate(PROMPTS, short, num_samples=2, seed=11)
    # Rounded in another order: where replies may come, sums do not depend on the company.
    assert nearly(begun(answers), plain)


def test_replies_stand_between_the_turns_and_a_seed_decides_all(make: Callable[..., Any]) -> None:
    engine, short = make(build("llama")), Sampling(max_new_tokens=3)
    asking = {"num_samples": 2, "seed": 11}
    first, again = (engine.generate(PROMPTS, short, **asking, reply=numbers_of) for _ in range(2))
    assert same(first, again)
    for group, (prompt, rollouts) in enumerate(zip(PROMPTS, first, strict=True)):
        for rollout in rollouts:
            assert (rollout.prompt, rollout.group) == (prompt, group)
            assert [turn.sampled for turn in rollout.turns] == [True, False, True, False, True]
            assert rollout.turns[1].tokens == (2 + len(rollout.turns[0].tokens) % 5, 3)
            assert rollout.mask.count(False) == 4
    plain = engine.generate(PROMPTS, short, **asking)
    assert nearly(begun(first), plain)


class Later:
    """The replies of ``numbers_of``, each in its own way: at once, or by a Future that is done when
    so many others have been asked for, the last ones first."""

    def __init__(self, *, held: int, at_once: int) -> None:
        self._held, self._at_once = held, at_once
        self._waiting: list[tuple[Future[Turn | None], Turn | None]] = []
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, rollout: Rollout, number: int) -> Turn | Future[Turn | None] | None:
        answer = numbers_of(rollout, number)
        with self._lock:
            self._count += 1
            if self._count % self._at_once == 0:
                return answer
            future: Future[Turn | None] = Future()
            self._waiting.append((future, answer))
            ready = self._waiting[self._held :] if len(self._waiting) > self._held else []
            del self._waiting[self._held :]
        for each, given in reversed(ready):
            each.set_result(given)
        threading.Timer(0.05, self._release).start()
        return future

    def _release(self) -> None:
        """Whoever waits for a reply gets it, though nothing else is asked."""
        with self._lock:
            ready, self._waiting = self._waiting, []
        for each, given in reversed(ready):
            each.set_result(given)


@pytest.mark.parametrize(("held", "at_once"), [(0, 1000), (4, 1000), (3, 2), (100, 3)])
def test_replies_that_come_later_change_no_token(
    make: Callable[..., Any], held: int, at_once: int
) -> None:
    """Done when asked for, delayed, out of order, mixed with replies at once."""
    engine, short = make(build("llama")), Sampling(max_new_tokens=3)
    asked = {"num_samples": 2, "seed": 11}
    expected = engine.generate(PROMPTS, short, **asked, reply=numbers_of)
    later = Later(held=held, at_once=at_once)
    found = engine.generate(PROMPTS, short, **asked, reply=later)
    assert nearly(unnamed(found), unnamed(expected))


def unnamed(answers: list[list[Rollout]]) -> list[list[Rollout]]:
    """Whichever engine of a pool has sampled them."""
    return [[dataclasses.replace(r, engine="") for r in group] for group in answers]


def test_an_error_in_a_reply_that_comes_later_is_raised(make: Callable[..., Any]) -> None:
    def reply(rollout: Rollout, number: int) -> Future[Turn | None]:
        future: Future[Turn | None] = Future()
        future.set_exception(RuntimeError("the environment is gone"))
        return future

    with pytest.raises(RuntimeError, match="the environment is gone"):
        make(build("llama")).generate(
            PROMPTS[:1], Sampling(max_new_tokens=3), num_samples=1, seed=0, reply=reply
        )


def test_a_part_of_a_call_draws_what_the_whole_draws(make: Callable[..., Any]) -> None:
    """Some sequences of a call, by their numbers there; also those that go on with a later turn."""
    engine, short = make(build("llama")), Sampling(max_new_tokens=3)
    whole = engine.generate(PROMPTS, short, num_samples=2, seed=11, reply=numbers_of)
    seen: list[int] = []

    def reply(rollout: Rollout, number: int) -> Turn | None:
        seen.append(number)
        return numbers_of(rollout, number)

    asked = {"num_samples": 2, "seed": 11, "reply": reply}
    part = engine.generate(PROMPTS[1:3], short, **asked, part=Part(numbers=(2, 3, 4, 5)))
    assert drawn(part) == drawn(whole[1:3])
    assert [r.group for group in part for r in group] == [0, 0, 1, 1]
    assert set(seen) == {2, 3, 4, 5}
    later = [
        dataclasses.replace(
            r.prompt, tokens=(*r.prompt.tokens, *r.turns[0].tokens, *r.turns[1].tokens)
        )
        for r in (whole[3][1], whole[0][0])
    ]
    place = Part(numbers=(7, 0), turn=1)
    again = engine.generate(later, short, num_samples=1, seed=11, part=place)
    expected = [whole[3][1].turns[2].tokens, whole[0][0].turns[2].tokens]
    assert [rollout.tokens for (rollout,) in again] == expected


def test_turns_draw_other_numbers(make: Callable[..., Any]) -> None:
    """The second turn does not draw what the first has drawn: its randomness is its own."""
    engine = make(build("llama"))
    repeat = [prompt for prompt in PROMPTS if len(prompt.tokens) == 9]

    def again(rollout: Rollout, number: int) -> Turn | None:
        return None if len(rollout.turns) > 1 else Turn(tokens=rollout.prompt.tokens, text="")

    answers = engine.generate(repeat, SAMPLINGS["hot"], num_samples=8, seed=0, reply=again)
    first, _, second = zip(*(r.turns for group in answers for r in group), strict=True)
    assert [turn.tokens for turn in first] != [turn.tokens for turn in second]


def test_a_conversation_that_leaves_no_room_is_over(make: Callable[..., Any]) -> None:
    model = build("llama")
    engine = make(model)
    limit = model.config.max_position_embeddings
    long = Turn(tokens=(2,) * (limit // 3), text="")
    short = dataclasses.replace(SAMPLINGS["plain"], max_new_tokens=2)
    ((rollout,),) = engine.generate(
        PROMPTS[:1], short, num_samples=1, seed=0, reply=lambda rollout, number: long
    )
    assert [turn.sampled for turn in rollout.turns] == [True, False, True, False, True]


@pytest.mark.parametrize(
    "wrong", [Turn(tokens=(), text=""), Turn(tokens=(1,), text="", logprobs=(0.0,))]
)
def test_a_reply_that_is_none_is_refused(make: Callable[..., Any], wrong: Turn) -> None:
    with pytest.raises(ValueError, match=r"expected a turn of tokens without logprobs, or None"):
        make(build("llama")).generate(
            PROMPTS[:1],
            SAMPLINGS["plain"],
            num_samples=1,
            seed=0,
            reply=lambda rollout, number: wrong,
        )


def test_closing_gives_memory_back_and_may_be_done_twice(make: Callable[..., Any]) -> None:
    """The model is the learner's: it stays as it is, and another engine samples from it."""
    model = build("llama")
    first, second = make(model), make(model)
    expected = first.generate(PROMPTS, SAMPLINGS["plain"], num_samples=2, seed=0)
    first.close()
    first.close()
    assert not isinstance(first, NativeEngine) or first._decoder.slots is None
    assert same(second.generate(PROMPTS, SAMPLINGS["plain"], num_samples=2, seed=0), expected)
