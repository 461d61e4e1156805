"""Two rewards: one that tells completions apart, and one on which all agree."""


def vowels(completion: str, answer: str, *, each: float = 0.5) -> float:
    return each * sum(completion.count(letter) for letter in "aeiou") + len(answer)


def agreed(completion: str) -> float:
    return 1.0
