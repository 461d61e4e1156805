"""A user's file, in the shape that TRL's documentation gives such files: nothing of ours in it."""


class SafeEnv:
    """A safe with a dial: the code is the answer of the row."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.row = kwargs
        self.code = int(kwargs.get("answer", 7))
        self.position = 0
        self.reward = 0.0
        self.done = False
        return " The dial is at 0." if kwargs.get("told", True) else None

    def turn(self, steps: int) -> str:
        """
        Turn the dial.

        Args:
            steps: How far to turn it; backwards where it is negative.

        Returns:
            Where the dial is now.
        """
        if self.done:
            raise ValueError("Game over.")
        self.position += steps
        return f"The dial is at {self.position}."

    def pull(self) -> str:
        """
        Pull the handle, which ends the game.

        Returns:
            Whether the safe opens.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = True
        self.reward = 1.0 if self.position == self.code else 0.0
        return "It opens." if self.reward else "It stays shut."

    def _secret(self) -> int:
        return self.code


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


def brevity(completions, **kwargs) -> list[float]:
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [-len(text) / 1000 for text in texts]
