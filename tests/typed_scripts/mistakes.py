"""Each line that ends in ``# error: WORD`` is a mistake that mypy finds, and it says WORD."""

import posttrain

posttrain.rl(prompts=["a"], reward=len, group_sise=4)  # error: group_sise
posttrain.rl(prompts=["a"], reward=len, steps="many")  # error: steps
posttrain.rl(prompts=["a"], reward=len, kl={"coeficient": 0.1})  # error: "kl"
posttrain.rl(prompts=["a"], reward=len, schedule="constnat")  # error: schedule
posttrain.rl(prompts=["a"], reward=len, run_options={"tracker": ["wandb"]})  # error: tracker
posttrain.rl(prompts=["a"], reward=len, grading={"workers": "two"})  # error: workers
posttrain.sft(data=[{"prompt": "a", "completion": "b"}], epoch=4)  # error: epoch
posttrain.dpo(model="tiny", data="pairs.jsonl", loss="dapo")  # error: loss
posttrain.reward(model="tiny", data="pairs.jsonl", margin=True)  # error: margin
posttrain.evaluate("tiny", task="sort", problem=3)  # error: problem
