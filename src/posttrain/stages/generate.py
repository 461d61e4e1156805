"""What a model answers to a prompt, or does in an environment, with the settings it comes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.build.model_source import Source, find_source, over
from posttrain.build.sampler import make_plain_sampler
from posttrain.build.setup import Setup, choose_device, make_policy, make_setup, make_template
from posttrain.config import of_any_model, resolve
from posttrain.config.specs import typed_task
from posttrain.envs import ENVS
from posttrain.models.cache import context_length
from posttrain.protocols import Env, Split
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.play import UNSCORED, Ask, Place, Show, TypedEnv, WatchedEngine, typed_engine
from posttrain.runs.finished import check_model
from posttrain.stages.eval import DEFAULT_TOKENS, tell_alone
from posttrain.stages.loaded.loaded_policy import longest_answer, stop_strings, stopping
from posttrain.track.progress import showing
from posttrain.types import Prompt, Rollout, Sampling

TYPED = "posttrain.rollout.play:one_prompt"  # the task of a prompt that was typed


@dataclass(frozen=True, kw_only=True)
class Player:
    """Plays episodes of a setup's policy in its environment, one after the other."""

    setup: Setup
    engine: WatchedEngine
    max_new_tokens: int
    stop: tuple[str, ...]
    drawing: Mapping[str, Any]

    def prompt(self, split: Split, index: int) -> Prompt:
        """A prompt of the task's split."""
        prompts = () if self.setup.task is None else self.setup.task.prompts(split)
        if not prompts:
            raise ValueError(f"task: it has no {split} prompts; take another split")
        if not 0 <= index < len(prompts):
            last = len(prompts) - 1
            raise ValueError(f"index: the {split} prompts are 0 to {last}, there is no {index}")
        return prompts[index]

    def play(self, prompt: Prompt, *, seed: int) -> Rollout:
        """One episode with its score; the seed decides every token that is sampled."""
        found = collect_scored(
            [replace(prompt, tokens=self.setup.template.render(prompt).tokens)],
            Sampling(max_new_tokens=self.max_new_tokens, stop=self.stop, **self.drawing),
            engine=self.engine,
            scorer=self.setup.graded,
            num_samples=1,
            seed=seed,
            env=self.setup.env,
        )
        return found.rollouts[0]

    def close(self) -> None:
        """End what runs beside this process, and give memory back."""
        self.engine.close()
        self.setup.close()


def is_broken(rollout: Rollout) -> bool:
    """Whether an episode is invalid, and not only one that nothing could score."""
    score = rollout.score
    return score is not None and not score.ok and UNSCORED not in score.reason


@showing()
def open_player(
    source: Source,
    env: str | Mapping[str, Any] | Env | Callable[..., Any] | None,
    *,
    options: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    human: Place | None = None,
    ask: Ask = input,
    show: Show = lambda rollout: None,
    chat: bool | str | None = None,
    max_new_tokens: int | None = None,
    max_turns: int | None = None,
    stop: Sequence[str] | None = None,
    **drawing: Any,
) -> Player:
    """All that an episode takes, loaded: a model, an environment, a task or a typed prompt.

    ``env`` is an environment, a class or function of one, its spec, or the recipe or run whose
    environment is meant; without one it is that of the model's own recipe or run; ``options`` are
    put over its own. ``human`` is in whose place ``ask`` writes.
    """
    source, spec = _with_environment(source, env)
    values = _of_episode(source, spec, options=options or {}, prompt=prompt, task=task)
    changes = {"chat": chat, "system": "" if chat is False else None}
    recipe = source.recipe(over(values, model=changes, **stopping(stop)), overrides)
    tell_alone(recipe)
    given: Any = None if env is None or isinstance(env, str | Mapping) else env
    if given is None and human != "env" and (recipe.task or {}).get("env") is None:
        raise ValueError(
            "env: which environment? Name one, or give a recipe or a run that has task.env"
        )
    changed = {} if max_turns is None else {"max_turns": max_turns}
    if human == "env":
        changed["workers"] = 0  # a worker has no terminal
    section = recipe.environment.model_copy(update=changed)
    resolved = resolve(recipe).model_copy(update={"environment": section})
    check_model(resolved.model.name)
    device = choose_device(resolved)
    policy = make_policy(resolved, resolved.model.name, device=device)
    if human == "env":
        given = TypedEnv(ask, chat=bool(make_template(resolved, policy).chat))
    setup = make_setup(resolved, policy, device=device, env=given)
    if human == "policy":
        engine: Any = typed_engine(ask, setup.template, end_token=policy.end_tokens[0])
    else:
        engine = make_plain_sampler(setup)
    # The environment's turns and the policy's later ones need room too.
    limit = context_length(policy.model)
    room = DEFAULT_TOKENS if limit is None else min(DEFAULT_TOKENS, max(1, limit // 4))
    return Player(
        setup=setup,
        engine=WatchedEngine(engine, show),
        max_new_tokens=max_new_tokens or longest_answer(recipe) or room,
        stop=stop_strings(recipe),
        drawing=drawing,
    )


def _with_environment(source: Source, env: Any) -> tuple[Source, str | Mapping[str, Any] | None]:
    """The settings to play with, and the spec of an environment that is not a recipe's or run's.

    A model alone is played with all the settings of that recipe or run; one that has settings of
    its own, with its task and rewards.
    """
    if env is None or not isinstance(env, str):
        return source, env if isinstance(env, Mapping) else None
    known = env in ENVS or (":" in env and not Path(env).exists())
    if known or not (env.endswith(".toml") or Path(env).expanduser().is_dir()):
        return source, env
    game = find_source(env)
    if source.run is not None or source.file:
        parts = ("task", "rewards")
        values = {name: table for name, table in source.values.items() if name not in parts}
        values |= {name: table for name, table in game.values.items() if name in parts}
        return replace(source, values=values), None
    asked, own = source.values["model"]["name"], game.values.get("model", {})
    sizes = {} if own.get("name", "tiny") == asked else of_any_model(own.get("options", {}))
    model = {"name": asked} | ({"options": sizes} if "options" in own else {})
    return replace(game, values=over(game.values, model=model)), None


def _of_episode(
    source: Source,
    env: str | Mapping[str, Any] | None,
    *,
    options: Mapping[str, Any],
    prompt: str | None,
    task: str | None,
) -> dict[str, Any]:
    """The settings of an evaluation of this prompt or task, in this environment."""
    if prompt is not None and task is not None:
        raise ValueError("prompt: give a prompt or a task, not both")
    known = source.values.get("task")
    own = {"name": known} if isinstance(known, str) else dict(known or {})
    env = own.pop("env", None) if env is None else env
    if prompt is not None:
        own = {"name": TYPED, "text": prompt}
    elif task is not None and task != own.get("name"):
        own = typed_task(task)
    if not own:
        raise ValueError("prompt: what does the episode begin with? Give a prompt, or name a task")
    if options and env is None:
        raise ValueError(f"env: options ({', '.join(options)}) of which environment? Name one")
    if env is not None:
        own["env"] = {**({"name": env} if isinstance(env, str) else env), **options}
    if prompt is None:
        return source.evaluation(task=own)
    # Only the environment can score it: that takes no workers.
    values = source.evaluation(task=own, given=["rewards"])
    return over({k: v for k, v in values.items() if k != "rewards"}, grading={"workers": 0})
