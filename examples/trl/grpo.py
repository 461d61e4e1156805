import posttrain
from posttrain.rewards import math_answer


def accuracy_reward(completion: str, solution: str) -> float:
    return math_answer(completion, solution)


run = posttrain.rl(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    prompts="trl-lib/DeepMath-103K",
    reward=accuracy_reward,
)
