"""A learner to a folder and back, bit for bit: weights, optimisers, critic, reference.

::

    model/                      the trained model, an ordinary folder; of adapters these alone
    weights.safetensors         weights that model/ does not hold as they are, where there are any
    optimizer.safetensors       the optimiser's moments, by weight
    critic.safetensors          critic_optimizer.safetensors          with a critic
    reference.safetensors       where it was refreshed; else it is what the stage started from

Of a learner over several ranks, what lies over them is a folder of shards in the place of a file
(``optimizer/``), and any number of ranks reads what any other wrote. Numbers that are no tensors
are returned, for the caller's JSON. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.disk import writing
from posttrain.learn.ranks import Ranks
from posttrain.learn.trained import Trained
from posttrain.models.files.adapter_folder import own_name
from posttrain.protocols import Learner

if TYPE_CHECKING:
    from posttrain.learn.learner import LocalLearner

MODEL = "model"
Like = Callable[[str], Tensor | None]
ELSEWHERE = "resume from another checkpoint, or start the stage over"


def save_learner(learner: LocalLearner, folder: Path) -> dict[str, Any]:
    """Write everything that the next step depends on; the numbers among it are returned."""
    ranks = learner.ranks
    learner.save(folder / MODEL)
    weights = learner.weights()  # of several ranks the first alone has them, and writes
    stored = _stored(folder / MODEL) if weights else ()
    held = {name for name, value in stored if _same(value, weights.get(name))}
    rest = {name: weight for name, weight in weights.items() if name not in held}
    if rest:  # some architectures are saved under other names, or in another shape
        _save(rest, folder / "weights.safetensors")
    numbers: dict[str, Any] = {
        "version": learner.version,
        "micro_batch_tokens": learner.micro_batch_tokens,
        "asked_tokens": learner.asked_tokens,
        "policy": _save_optimizer(learner.trained, folder / "optimizer.safetensors", ranks=ranks),
    }
    if learner.critic is not None:
        critic = learner.critic.weights()
        _save_all(critic, folder / "critic.safetensors", ranks=ranks)
        moments = folder / "critic_optimizer.safetensors"
        numbers["critic"] = _save_optimizer(learner.critic, moments, ranks=ranks)
    if learner.refreshed and learner.reference is not None:
        _save_all(learner.reference.weights(), folder / "reference.safetensors", ranks=ranks)
    return numbers


def load_learner(learner: LocalLearner, folder: Path, *, numbers: Mapping[str, Any]) -> None:
    """Make a learner of the same recipe what it was when :func:`save_learner` wrote it."""
    weights = learner.trained.weights()
    files = [folder / MODEL, folder / "weights.safetensors"]
    _load(weights, files, kind="model")
    _load_optimizer(learner.trained, folder / "optimizer.safetensors", numbers=numbers["policy"])
    if (learner.critic is not None) != ("critic" in numbers):
        had = "without" if learner.critic else "with"
        raise ValueError(
            f"{folder}: was written {had} a critic; resume under the recipe that wrote it"
        )
    if learner.critic is not None:
        _load(learner.critic.weights(), [folder / "critic.safetensors"], kind="critic")
        _load_optimizer(
            learner.critic, folder / "critic_optimizer.safetensors", numbers=numbers["critic"]
        )
    if _exists(folder / "reference.safetensors") and learner.reference is not None:
        _load(learner.reference.weights(), [folder / "reference.safetensors"], kind="reference")
        learner.refreshed = True
    learner.version = int(numbers["version"])
    learner.restore_tokens(int(numbers["micro_batch_tokens"]), asked=numbers["asked_tokens"])


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """A copy of the trained model's weights, in main memory."""
    weights = learner.weights()
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


@torch.no_grad()
def swap_weights(learner: Learner, weights: Mapping[str, Tensor]) -> None:
    """Swap the model's weights with these, in place: a second swap restores both."""
    for name, weight in learner.weights().items():
        before = weight.detach().to("cpu", copy=True)
        weight.copy_(weights[name])
        weights[name].copy_(before)


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights that :func:`weights_of` has copied."""
    _save(weights, path)


def load_weights(learner: Learner, path: Path) -> dict[str, Tensor]:
    """Weights that :func:`save_weights` wrote of a model like this one."""
    weights = weights_of(learner)
    _load(weights, [path], kind="model")
    return weights


def _same(stored: Tensor, weight: Tensor | None) -> bool:
    if weight is None or stored.dtype != weight.dtype or stored.shape != weight.shape:
        return False
    return torch.equal(stored, weight.detach().cpu())


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with writing(path):
        save_file(plain, path)


def _save_all(tensors: Mapping[str, Tensor], path: Path, *, ranks: Ranks) -> None:
    """Write tensors that lie over the ranks, each its own part of them."""
    if ranks.size == 1:
        _save(tensors, path)
        return
    from posttrain.learn.shards import save_shards  # not for one rank: it takes a while to import

    with writing(path.with_suffix("")):
        save_shards(tensors, path.with_suffix(""))


def _exists(path: Path) -> bool:
    return path.exists() or path.with_suffix("").exists()


def _stored(path: Path, like: Like = lambda name: None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, or of all files in a folder, one at a time; none if it is missing.

    Shards in the place of a file are read as what is ``like`` them lies, by name.
    """
    if not path.exists() and path.with_suffix("").is_dir():
        from posttrain.learn.shards import load_shards

        try:
            yield from load_shards(path.with_suffix(""), like).items()
        except ValueError as error:
            raise ValueError(f"{error}; {ELSEWHERE}") from error
        return
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        if file.exists():
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - safe_open gives no dict
                        yield own_name(name), opened.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{file}: is damaged ({error}); {ELSEWHERE}") from error


@torch.no_grad()
def _load(weights: Mapping[str, Tensor], files: list[Path], *, kind: str) -> None:
    """Copy tensors from files into weights in place; raise if one is missing or does not fit."""
    missing = dict(weights)
    for file in files:
        for name, value in _stored(file, weights.get):
            weight = weights.get(name)
            if weight is None or value.shape != weight.shape or value.dtype != weight.dtype:
                continue
            weight.copy_(_lying_as(value, weight))
            missing.pop(name, None)
    if missing:
        raise ValueError(
            f"{files[0].parent}: does not fit this {kind}: {len(missing)} of {len(weights)} "
            f"weights are not in it, {min(missing)!r} for one; resume under the recipe that "
            "wrote it"
        )


def _lying_as(value: Tensor, weight: Tensor) -> Tensor:
    """A stored tensor as a weight lies over the ranks."""
    if not hasattr(weight, "full_tensor"):
        return value
    from posttrain.learn.shards import lying_as

    return lying_as(value, weight)


def _names(trained: Trained) -> list[str]:
    """The weights of an optimiser by name, in the order in which it numbers them."""
    known = {id(weight): name for name, weight in trained.module.named_parameters()}
    groups = trained.optimizer.param_groups
    return [known[id(weight)] for group in groups for weight in group["params"]]


def _save_optimizer(trained: Trained, path: Path, *, ranks: Ranks) -> dict[str, Any]:
    """Write the moments; parameter groups are not saved, as recipe and step determine them."""
    names = _names(trained)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for number, moments in trained.optimizer.state_dict()["state"].items():
        for key, value in _flat(moments).items():
            if isinstance(value, Tensor):
                tensors[f"{key} {names[number]}"] = value
            elif isinstance(value, bool | int | float):
                numbers.setdefault(names[number], {})[key] = value
            else:
                raise TypeError(
                    f"checkpoint: the optimiser keeps {key!r} as a {type(value).__name__}, which "
                    "cannot be saved exactly; use one that keeps tensors and numbers"
                )
    _save_all(tensors, path, ranks=ranks)
    return {"num_steps": trained.num_steps, "numbers": numbers}


def _flat(moments: Mapping[str, Any]) -> dict[str, Any]:
    """Moments by name; an 8-bit optimiser keeps tables of tensors, and some of them share memory.

    >>> list(_flat({"step": 1, "state": {"code": torch.zeros(1)}}))
    ['step', 'state/code']
    """
    found: dict[str, Any] = {}
    for key, value in moments.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": part.to("cpu", copy=True) for name, part in value.items()}
        else:
            found[key] = value
    return found


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """What :func:`_flat` was given."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        outer, _, inner = key.partition("/")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[key] = value
    return found


def _load_optimizer(trained: Trained, path: Path, *, numbers: Mapping[str, Any]) -> None:
    positions = {name: number for number, name in enumerate(_names(trained))}
    weights = dict(trained.module.named_parameters())
    state: dict[int, dict[str, Any]] = {}
    for given, value in _stored(path, lambda given: weights.get(given.partition(" ")[2])):
        key, _, name = given.partition(" ")
        if name not in positions:
            raise ValueError(f"{path}: holds {given!r}, which is not trained here; {ELSEWHERE}")
        if value.ndim and "/" not in key and value.shape != weights[name].shape:
            shapes = f"{list(value.shape)}, not {list(weights[name].shape)}"
            raise ValueError(f"{path}: {given!r} has the shape {shapes}; {ELSEWHERE}")
        lies = _lying_as(value, weights[name]) if value.ndim and "/" not in key else value
        state.setdefault(positions[name], {})[key] = lies
    for name, held in numbers["numbers"].items():
        state.setdefault(positions[name], {}).update(held)
    nested = {number: _nested(moments) for number, moments in state.items()}
    kinds = {frozenset(moments) for moments in nested.values()}
    if numbers["num_steps"] and len(kinds) != 1:
        what = "some weights lack moments" if kinds else "holds no moments of an optimiser"
        raise ValueError(f"{path}: {what}; {ELSEWHERE}")
    groups = trained.optimizer.state_dict()["param_groups"]
    trained.optimizer.load_state_dict({"state": nested, "param_groups": groups})
    trained.num_steps = int(numbers["num_steps"])
