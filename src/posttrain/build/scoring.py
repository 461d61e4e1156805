"""The rewards of a recipe as one scorer, and its environment: what runs in worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import track
from posttrain.config import EnvironmentSection, GradingSection
from posttrain.config.specs import MODEL_REWARD, OWN_STAGE
from posttrain.data.template import Template
from posttrain.envs.env_pool import EnvPool
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel
from posttrain.models.reward_scorer import reward_scorer
from posttrain.protocols import Env
from posttrain.rewards.pool import GradingPool
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.environment import Environment
from posttrain.types import Rollout, Score


def make_scorer(
    specs: Mapping[str, Any],
    template: Template,
    *,
    device: str,
    own: Path | None = None,
    env: Env | None = None,
) -> RewardScorer:
    """The scorer of a table of rewards; ``own`` is the model that this run's stage will make.

    Any other reward model is loaded and checked here, before anything is trained. With an ``env``
    to score, the table may be empty.
    """
    made: dict[Any, Any] = {}
    for name, given in specs.items():
        if name != MODEL_REWARD:
            made[name] = given
            continue
        options = dict(given) if isinstance(given, Mapping) else {"weight": given}
        weight = options.pop("weight", 1.0)
        path = options.pop("path", OWN_STAGE)
        scorer = reward_scorer(
            device,
            Reader(template),
            path=str(own) if path == OWN_STAGE and own is not None else path,
            **options,
        )
        if path != OWN_STAGE:
            _ = scorer.reward
        made[scorer] = weight
    return RewardScorer(made, needed=env is None)


def check_scores(env: Env | None) -> None:
    """Refuse an environment that says of itself that it never scores, where nothing else does."""
    if getattr(env, "scores", True) is False:
        raise ValueError(
            "rewards: the environment does not score, and there is no reward with a weight, so "
            "nothing can be learned; give one: [rewards] (reward=… from Python)"
        )


def make_environment(
    section: EnvironmentSection, env: Env | None, *, template: Template, policy: Policy
) -> Environment | None:
    """An environment in workers and with limits, as a recipe asks; close it when done."""
    if env is None:
        return None
    return Environment(
        pool=EnvPool(
            env,
            workers=section.workers,
            threads=section.threads,
            seconds=section.seconds,
            memory_mb=section.memory_mb,
            tell=track.teller(),
        ),
        encode=template.encode_reply,
        render=template.render,
        max_turns=section.max_turns,
        max_tokens=section.max_tokens,
        longest=context_length(policy.model),
        vocabulary=policy.model.get_input_embeddings().num_embeddings,
    )


def in_workers(scorer: RewardScorer, grading: GradingSection) -> RewardScorer:
    """The scorer with its functions in worker processes, as a recipe asks; close it when done."""
    if grading.workers == 0 or not scorer.functions:
        return scorer
    pool = GradingPool(
        scorer.functions,
        workers=grading.workers,
        seconds=grading.seconds,
        memory_mb=grading.memory_mb,
    )
    return scorer.with_grader(pool)


def close(scorer: object) -> None:
    """End the workers of a scorer that has any."""
    grader = getattr(scorer, "grader", None)
    if isinstance(grader, GradingPool):
        grader.close()


def workers_died(scorer: object, metric: str) -> dict[str, float]:
    """The workers of a scorer that have ended by themselves; nothing where none has."""
    grader = getattr(scorer, "grader", None)
    died = grader.died if isinstance(grader, GradingPool) else 0
    return {metric: float(died)} if died else {}


def check_invalid(rollouts: Sequence[Rollout], max_invalid: float, *, of: str = "") -> None:
    """Stop the run when too many graders broke, with what the first one said."""
    broken = [r for r in rollouts if r.score is not None and not r.score.ok]
    if len(broken) <= max_invalid * len(rollouts):
        return
    first = broken[0]
    score = first.score or Score(value=0.0)
    shown = [f"prompt {first.prompt.id!r}: {track.printable(first.prompt.shown, limit=200)}"]
    shown.append(f"completion: {track.printable(first.text, limit=400)}")
    shown += [track.printable(line, limit=200) for line in score.details.splitlines()]
    raise RuntimeError(
        f"rewards: {len(broken)} of {len(rollouts)} scores{of} are broken, more than max_invalid "
        f"= {max_invalid:g}. The first, on prompt {first.prompt.id!r}: {score.reason}. "
        "Fix the reward, or the environment; `posttrain` never counts a broken grader as a wrong "
        "answer\n  " + "\n  ".join(shown)
    )


class Reader:
    """Writes rollouts down as a reward model reads them, with an end token behind each.

    One that has learned from completions which were cut off reads such as they stand.
    A reward model that knows the policy's tokens reads the very tokens that were sampled; another
    one reads the text, written by its own tokenizer and chat template.
    """

    def __init__(self, template: Template) -> None:
        self._policy = template
        self._own: Template | None = None

    def __call__(self, reward: RewardModel, rollout: Rollout) -> tuple[int, ...]:
        """The tokens of prompt and completion."""
        self._own = self._own or reader_of(reward, self._policy)
        prompt, written = rollout.prompt, rollout.tokens
        cut = rollout.stop_reason == "length" and reward.knows_cut
        if self._own is not self._policy:
            return self._own.encode_exchange(prompt, rollout.text)
        end = reward.tokenizer.eos_token_id
        before = prompt.tokens or self._own.render(prompt).tokens
        if not written:
            return (*before, *self._own.encode_completion(rollout.text, end, ended=not cut))
        tokens = (*before, *written)
        ended = written[-1] in self._policy.end_tokens
        full = len(tokens) == context_length(reward.model)  # no room: it is judged as it stands
        return tokens if ended or cut or full or end is None else (*tokens, end)


def reader_of(reward: RewardModel, template: Template) -> Template:
    """How a reward model reads: as the policy writes, if it knows the policy's tokens."""
    theirs, ours = reward.tokenizer.get_vocab(), template.tokenizer.get_vocab()
    same = all(theirs.get(token) == index for token, index in ours.items())
    if same and reward.chat in (None, template.chat):
        return template
    chat = reward.chat if reward.chat is not None else bool(reward.tokenizer.chat_template)
    # What a policy wrote is never a special token of another model, whatever its own data may be.
    return Template(reward.tokenizer, chat=chat, system=template.system if chat else "")
