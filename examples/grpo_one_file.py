"""GRPO from nothing, in one file, top to bottom: sample, score, compare siblings, clip, step.

    python examples/grpo_one_file.py

A character-level model learns to add digits ("3+5=" → "8") from rewards alone: after a short
warm-up on answers of which half are wrong, it sees nothing but 1 for right and 0 for wrong. This is
what `posttrain.rl(algorithm="grpo")` does, without its speed, its checks and its options; a test
proves that both take the same steps. Not here: batching by length, a key-value cache, checkpoints.

Shapes: P prompts, G completions of each, B = P·G sequences, T tokens, V vocabulary.
"""

import copy
import random

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHARACTERS = "0123456789+="
END = len(CHARACTERS)  # ends a completion, and fills the rows after it

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8  # completions of each prompt: they are one another's baseline
MAX_NEW_TOKENS = 3
LEARNING_RATE = 5e-4
CLIP = 0.2  # ρ may not gain from leaving [1 − CLIP, 1 + CLIP]
KL_COEFFICIENT = 0.001  # β: what leaving the reference costs; little, as half of it is wrong
STEPS = 200


def encode(text):
    """Characters to tokens."""
    return [CHARACTERS.index(character) for character in text]


def decode(tokens):
    """Tokens up to the end, as characters."""
    kept = tokens[: tokens.index(END)] if END in tokens else tokens
    return "".join(CHARACTERS[token] for token in kept)


def make_model(seed):
    """A Llama of two layers, small enough to train in seconds on a CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def sample(model, prompts, *, group_size, max_new_tokens, seed, end=END):
    """Draw completions token by token: [P] prompts of equal length → tokens [B, T], mask [B, T].

    The mask is born here: True where the policy chose the token, its end token included. Every
    sequence has a stream of random numbers of its own, decided by the seed.
    """
    tokens = torch.tensor(prompts).repeat_interleave(group_size, dim=0)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    streams = [
        np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, row, 0]))
        for row in range(len(tokens))
    ]
    uniforms = torch.tensor(np.stack([stream.random(max_new_tokens) for stream in streams]))
    running = torch.ones(len(tokens), dtype=torch.bool)
    for step in range(max_new_tokens):
        logits = model(input_ids=tokens).logits[:, -1].float()  # about the next token
        cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
        drawn = (cumulative > uniforms[:, step : step + 1] * cumulative[:, -1:]).int().argmax(-1)
        tokens = torch.cat([tokens, torch.where(running, drawn, end)[:, None]], dim=1)
        mask = torch.cat([mask, running[:, None]], dim=1)
        running = running & (drawn != end)
    return tokens, mask


def token_logprobs(model, tokens):
    """log π(token t | tokens before t): [B, T]. What the model says at t − 1 is about token t."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))  # token 0 has nothing before it


def group_advantages(rewards, group_size):
    """A = (R − mean of the group) / (deviation of the group), 0 where all agree: [B] → [B]."""
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    deviation = grouped.std(dim=1, keepdim=True)
    advantages = torch.where(deviation > 0, centred / (deviation + 1e-6), 0.0)
    return advantages.flatten()


def grpo_loss(logprobs, *, old, reference, advantages, mask):
    """−min(ρA, clip(ρ)A) + β·KL, averaged over each sequence's tokens, then over sequences."""
    ratio = (logprobs - old).exp()
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    difference = reference - logprobs
    kl = difference.exp() - difference - 1  # k3: never negative
    per_token = (-surrogate + KL_COEFFICIENT * kl) * mask
    return (per_token.sum(dim=1) / mask.sum(dim=1)).mean()


def grpo_step(
    model, reference, *, optimizer, prompts, reward, seed, group_size, max_new_tokens, end=END
):
    """One batch of rollouts, one optimiser step; returns the loss and the mean reward."""
    tokens, mask = sample(
        model, prompts, group_size=group_size, max_new_tokens=max_new_tokens, seed=seed, end=end
    )
    completions = [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)]
    rewards = torch.tensor(
        [reward(index // group_size, completion) for index, completion in enumerate(completions)],
        dtype=torch.float64,
    )
    advantages = group_advantages(rewards, group_size).float()
    with torch.no_grad():  # frozen: π_old and the reference are numbers, not functions of θ
        old = token_logprobs(model, tokens)
        ref = token_logprobs(reference, tokens)
    loss = grpo_loss(
        token_logprobs(model, tokens), old=old, reference=ref, advantages=advantages, mask=mask
    )
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), rewards.mean().item()


def warm_up(model, problems, *, epochs, seed):
    """Likelihood of demonstrations, half of them wrong: the form is learned, the sums hardly."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rows = []
    for number, (question, answer) in enumerate(problems):
        shown = generator.choice(problems)[1] if number % 2 else answer
        rows.append(encode(question) + encode(shown) + [END])
    width = max(len(row) for row in rows)
    tokens = torch.tensor([row + [END] * (width - len(row)) for row in rows])
    start = len(problems[0][0])
    mask = torch.tensor([[start <= t < len(row) for t in range(width)] for row in rows])
    for _ in range(epochs):
        for part in torch.randperm(len(rows)).split(64):
            logprobs = token_logprobs(model, tokens[part])
            loss = -(logprobs * mask[part]).sum() / mask[part].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, problems):
    """Share of problems answered right, taking the likeliest token every time."""
    tokens = torch.tensor([encode(question) for question, _ in problems])
    start = tokens.shape[1]
    for _ in range(MAX_NEW_TOKENS):
        best = model(input_ids=tokens).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, best[:, None]], dim=1)
    answers = [decode(row) for row in tokens[:, start:].tolist()]
    return sum(a == b for a, (_, b) in zip(answers, problems, strict=True)) / len(problems)


def main():
    """Warm up, train, and print how held-out accuracy grows."""
    digits = range(10)
    problems = [(f"{a}+{b}+{c}=", str(a + b + c)) for a in digits for b in digits for c in digits]
    random.Random(0).shuffle(problems)
    train, test = problems[:800], problems[800:]
    model = make_model(seed=0)
    warm_up(model, train, epochs=20, seed=0)
    print(f"after the warm-up: {accuracy(model, test):.0%} of held-out sums are right")

    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in range(STEPS):
        chosen = random.Random(step).sample(train, PROMPTS_PER_STEP)

        def reward(prompt, completion, chosen=chosen):
            return float(completion[-1] == END and decode(completion) == chosen[prompt][1])

        loss, mean_reward = grpo_step(
            model,
            reference,
            optimizer=optimizer,
            prompts=[encode(question) for question, _ in chosen],
            reward=reward,
            seed=step,
            group_size=GROUP_SIZE,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        if (step + 1) % 20 == 0:
            held_out = accuracy(model, test)
            numbers = f"reward {mean_reward:.2f}, loss {loss:+.4f}, held out {held_out:.0%}"
            print(f"step {step + 1}: {numbers}")


if __name__ == "__main__":
    main()
