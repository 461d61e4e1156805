"""Several adapters in one batch: each sequence is what its adapter alone would have said."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from models.families import build
from rollout.cases import END, drawn, ragged, spell
from rollout.test_slot_turns import several

from posttrain.fast.compiled import compile_layers
from posttrain.models.adapter_group import AdapterGroup, choice_of
from posttrain.models.adapters import AdapterSettings, adapted_layers, add_adapters
from posttrain.protocols import Reply
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.joint import JointCall, JointEngine
from posttrain.types import Rollout, Sampling

PROMPTS = ragged(4, 9, 1, 9, 6)
LONG = Sampling(max_new_tokens=24, temperature=1.3)
ALPHAS = (32.0, 5.0, 12.0)


def group_of(
    number: int, *, dtype: torch.dtype = torch.float64, scale: float = 0.3
) -> AdapterGroup:
    """Adapters that say other things than each other."""
    model = build("llama").to(dtype)
    settings = [AdapterSettings(rank=3, alpha=ALPHAS[n % 3]) for n in range(number)]
    add_adapters(model, settings[0], seed=0)
    group = AdapterGroup(model, number)
    for member, each in enumerate(settings):
        group.add(member, each, seed=member)
        noise = torch.Generator().manual_seed(100 + member)
        for layer in adapted_layers(model).values():
            new = torch.randn(layer.adapter.B.shape, generator=noise) * scale
            layer.adapter.B.data.copy_(new)
        group.publish(member)
    return group


def asked(member: int, *, sampling: Sampling = LONG, reply: Reply | None = None) -> JointCall:
    return JointCall(
        prompts=PROMPTS[: 4 + member % 2],
        sampling=sampling,
        num_samples=2 + member % 2,
        seed=10 + member // 2,
        reply=reply,
        part=None,
        version=member,
    )


def alone(group: AdapterGroup, member: int, call: JointCall, **options: Any) -> list[list[Rollout]]:
    group.put(member)
    engine = NativeEngine(group.model, end_tokens=(END, 7), decode=spell, **options)
    return engine.generate(
        call.prompts,
        call.sampling,
        num_samples=call.num_samples,
        seed=call.seed,
        reply=call.reply,
    )


def largest_difference(
    found: Sequence[Sequence[Rollout]], expected: Sequence[Sequence[Rollout]]
) -> float:
    assert drawn(found) == drawn(expected)
    pairs = zip(chain(*found), chain(*expected), strict=True)
    return max(
        abs(one - other)
        for mine, theirs in pairs
        for turn, same in zip(mine.turns, theirs.turns, strict=True)
        for one, other in zip(turn.logprobs or (), same.logprobs or (), strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"slots": False}, {"max_sequences": 7}, {"slots": False, "max_sequences": 7}],
    ids=["slots", "padded", "few slots", "padded parts"],
)
@pytest.mark.parametrize("replies", [None, several], ids=["one turn", "turns"])
def test_each_sequence_is_its_adapters_own(options: dict[str, Any], replies: Reply | None) -> None:
    group = group_of(3)
    engine = JointEngine(group, end_tokens=(END, 7), decode=spell, **options)
    calls = {member: asked(member, reply=replies) for member in range(3)}
    found = engine.answer(calls)
    for member, call in calls.items():
        mine = found[member]
        assert not isinstance(mine, Exception)
        assert largest_difference(mine, alone(group, member, call, **options)) < 1e-12
        turns = [turn for rollouts in mine for r in rollouts for turn in r.turns if turn.sampled]
        assert {turn.version for turn in turns} == {member}
        assert [r.group for rollouts in mine for r in rollouts][-1] == len(call.prompts) - 1
    texts = {repr(drawn(answers)) for answers in found.values() if isinstance(answers, list)}
    assert len(texts) == 3


def test_one_adapter_is_an_ordinary_one_to_the_bit() -> None:
    group = group_of(1, dtype=torch.float32)
    call = asked(0)
    engine = JointEngine(group, end_tokens=(END, 7), decode=spell)
    (found,) = engine.answer({0: call}).values()
    assert not isinstance(found, Exception)
    assert largest_difference(found, alone(group, 0, call)) == 0.0


def test_other_sampling_is_another_call_and_a_diverged_adapter_fails_alone() -> None:
    """What one makes of a state is not finite: its sequences raise, the others say the same."""
    group = group_of(3)
    before = [alone(group, member, asked(member)) for member in range(2)]
    group.put(2)
    for layer in adapted_layers(group.model).values():
        layer.adapter.A.data.fill_(1e308)
    group.publish(2)
    engine = JointEngine(group, end_tokens=(END, 7), decode=spell)
    greedy = Sampling(max_new_tokens=5, temperature=0.0)
    found = engine.answer({0: asked(0), 1: asked(1), 2: asked(2)})
    assert isinstance(found[2], ValueError)
    for member in (0, 1):
        mine = found[member]
        assert not isinstance(mine, Exception)
        assert largest_difference(mine, before[member]) < 1e-12
    apart = engine.answer({0: asked(0), 1: asked(1, sampling=greedy)})
    call = asked(1, sampling=greedy)
    assert not isinstance(apart[1], Exception)
    assert largest_difference(apart[1], alone(group, 1, call)) < 1e-12


def test_half_precision_samples_from_a_fused_copy_with_all_adapters() -> None:
    """As bfloat16 on a GPU: the copy is cast, layers are fused, and it follows the adapters."""
    group = group_of(3, dtype=torch.float32, scale=0.1)
    options: dict[str, Any] = {"compute": torch.bfloat16, "end_tokens": (END, 7), "decode": spell}
    engine = JointEngine(group, **options)
    short = Sampling(max_new_tokens=1, temperature=0.0)
    for _ in range(2):
        found = engine.answer({member: asked(member, sampling=short) for member in range(3)})
        for member in range(3):
            mine, call = found[member], asked(member, sampling=short)
            theirs = alone(group, member, call, compute=torch.bfloat16)
            assert not isinstance(mine, Exception)
            logprobs = [[r.logprobs[0] for r in row] for row in mine]
            expected = [[r.logprobs[0] for r in row] for row in theirs]
            torch.testing.assert_close(
                torch.tensor(logprobs[0]), torch.tensor(expected[0]), rtol=0.05, atol=0.05
            )
        for member in range(3):
            group.put(member)
            for layer in adapted_layers(group.model).values():
                layer.adapter.B.data.mul_(-2.0)
            group.publish(member)


def test_adapters_keep_what_they_learned_while_others_are_in_the_model() -> None:
    group = group_of(3)
    layer = next(iter(adapted_layers(group.model).values()))
    group.put(1)
    layer.adapter.B.data.fill_(0.25)
    assert layer.adapter.scale == ALPHAS[1] / 3
    group.put(2)
    assert not bool((layer.adapter.B == 0.25).any())
    group.put(1)
    assert bool((layer.adapter.B == 0.25).all())


@pytest.mark.slow
def test_compiled_layers_choose_adapters_too() -> None:
    group = group_of(2, dtype=torch.float32)
    model, choice = group.sampled, choice_of(group.sampled)
    assert choice is not None
    tokens = torch.arange(12).reshape(4, 3)
    owners = torch.tensor([0, 1, 1, 0])
    plain = copy.deepcopy(model)
    compile_layers(model)
    choice.choose(owners, 3)
    with torch.no_grad():
        expected = plain(input_ids=tokens, use_cache=False).logits
        for rows in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3]):
            choice.choose(owners[rows], 3)
            found = model(input_ids=tokens[rows], use_cache=False).logits
            torch.testing.assert_close(found, expected[rows], rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_refused_by_name_and_shape() -> None:
    group = group_of(2)
    own = {n: w.detach().clone() + 1 for n, w in group.model.named_parameters() if w.requires_grad}
    group.add(0, AdapterSettings(rank=3), weights=own)
    now = dict(group.model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in own.items())
    first, last = min(own), max(own)
    missing = {name: weight for name, weight in own.items() if name != last}
    shaped = {**own, first: own[first][:2]}
    strange = {**own, "other.adapter.A": own[first]}
    for weights, said in (
        (missing, f"1 weights do not fit .*: {last} is missing; "),
        (shaped, rf"{first} is \[2, 24\], not \[3, 24\]"),
        (strange, "other.adapter.A is not in this model"),
    ):
        with pytest.raises(ValueError, match=said):
            group.add(1, AdapterSettings(rank=3), weights=weights)
