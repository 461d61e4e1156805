"""Which keys of a recipe would take less memory, alone and together: each answer is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from posttrain.config import Resolved
from posttrain.config.toml import as_overrides, value_text
from posttrain.estimate.parts import CONTEXT, Footprint, footprint
from posttrain.estimate.work import Work
from posttrain.learn.optim import check_moments
from posttrain.models.quantized import check_quantize

Keys = Mapping[str, Any]  # dotted keys of a recipe, and what to set them to

RANK, FEWEST_TOKENS, FEWEST_SEQUENCES = 16, 1024, 16
WORTH = 0.02  # a share of the peak: less is not worth a line


class Option(NamedTuple):
    """What to write into a recipe, and the memory that the run then takes."""

    keys: Keys
    found: Footprint

    @property
    def text(self) -> str:
        """The keys as one would name them."""
        return ", ".join(f"{key} = {value_text(value)}" for key, value in self.keys.items())


@dataclass(frozen=True)
class Search:
    """What a recipe takes on a device with so much ``memory``, as it is and with other keys.

    ``read`` is the recipe with overrides of the command line, and raises a ValueError where the
    rules of recipes refuse one; ``ask`` is :func:`posttrain.estimate.work.work_of` of the device.
    """

    read: Callable[[Sequence[str]], Resolved]
    ask: Callable[..., Work]
    memory: float

    @cached_property
    def recipe(self) -> Resolved:
        """The recipe as it is."""
        return self.read(())

    @cached_property
    def work(self) -> Work:
        """Its work."""
        return self.ask(self.recipe)

    @cached_property
    def found(self) -> Footprint:
        """Its memory."""
        return footprint(self.work, self.memory)

    @cached_property
    def fit(self) -> bool:
        """Whether the device is enough for the recipe as it is."""
        return self._holds(self.found)

    def refusal(self, keys: Keys) -> str | None:
        """Why the recipe cannot have these keys, or not here; None: it can."""
        try:
            recipe = self.read(as_overrides(keys))
            check_moments(recipe.rl.adam_moments)
            check_quantize(recipe.adapter.quantize)
        except ValueError as error:
            return str(error)
        return None

    def helpful(self) -> list[Option]:
        """The single options that lower the peak, the most helpful first."""
        tried = [Option(keys, self._footprint(keys)) for keys in self.allowed]
        kept = [option for option in tried if option.found.peak < (1 - WORTH) * self.found.peak]
        return sorted(kept, key=lambda option: option.found.peak)

    @cached_property
    def allowed(self) -> list[Keys]:
        """Each single option that the rules allow, the least intrusive first."""
        return [keys for keys in candidates(self.recipe, self.work) if not self.refusal(keys)]

    @property
    def refused(self) -> list[str]:
        """Why other options are not among them."""
        refused = (self.refusal(keys) for keys in candidates(self.recipe, self.work))
        return [why for why in refused if why]

    def together(self) -> Option | None:
        """The least intrusive options that make the recipe fit together; None: none do.

        An option is taken only where all that are less intrusive are not enough, and of those only
        what is needed beside it. This finds what trying all combinations in that order would,
        because no option makes a run larger than its device that was not.
        """
        kept: list[Keys] = []
        for keys in self.allowed:
            kept.append(keys)
            if self.fits(kept):
                break
        else:
            return None
        for keys in kept[-2::-1]:
            fewer = [other for other in kept if other is not keys]
            kept = fewer if self.fits(fewer) else kept
        merged = self.merged(kept)
        return Option(merged, self._footprint(merged))

    def merged(self, options: Sequence[Keys]) -> Keys:
        """Options as one, without those that the rules refuse beside more intrusive ones."""
        found: Keys = {}
        for keys in reversed(options):
            both = {**found, **keys}
            found = found if found and self.refusal(both) else both
        order = [key for keys in candidates(self.recipe, self.work) for key in keys]
        return {key: found[key] for key in dict.fromkeys(order) if key in found}

    def fits(self, options: Sequence[Keys]) -> bool:
        """Whether the device is enough with these options."""
        return self._holds(self._footprint(self.merged(options)))

    def _holds(self, found: Footprint) -> bool:
        """Whether the device has so much, beside what its driver takes."""
        return found.peak + (CONTEXT if self.work.device == "cuda" else 0) <= self.memory

    def _footprint(self, keys: Keys) -> Footprint:
        work = self.ask(self.read(as_overrides(keys)), like=self.work)
        return footprint(work, self.memory)


def candidates(recipe: Resolved, work: Work) -> list[Keys]:
    """Every option that changes something here, in the order of what it costs the user.

    First what leaves the result as it is and costs time alone, then what rounds numbers, then
    what changes the algorithm, then what learns, and at last what it learns beside.
    """
    on_gpu, whole = work.device == "cuda", work.dtype == "float32"
    rank = {} if recipe.adapter.rank else {"adapter.rank": RANK}
    copied = work.reference if rank else None  # adapters need no copy for a reference
    tokens = max(work.longest, FEWEST_TOKENS)
    asked = work.tokens if work.micro_batch_tokens == "auto" else work.micro_batch_tokens
    at_once = (work.sequences_at_once or work.sequences) if work.samples_here else 0
    rows: list[tuple[Keys, bool]] = [
        ({"model.compile": True}, on_gpu and not work.compiled and recipe.model.compile == "auto"),
        (
            {"rl.micro_batch_tokens": tokens},
            work.micro_batch_tokens != "auto" and tokens < min(asked, work.tokens),
        ),
        ({"rl.engine.max_sequences": FEWEST_SEQUENCES}, at_once > FEWEST_SEQUENCES),
        ({"rl.kl.offload": True}, on_gpu and copied is not None and not copied.offload),
        ({"rl.checkpoint_activations": True}, not work.checkpointed),
        ({"rl.kl.dtype": "bfloat16"}, whole and copied is not None and copied.dtype is None),
        ({"rl.adam_moments": "8bit"}, work.moments == "full"),
        ({"rl.critic.kind": "shared"}, work.critic == "separate"),
        (rank, bool(rank)),
        ({**rank, "model.dtype": "bfloat16"}, on_gpu and whole),
        ({**rank, "adapter.quantize": "nf4"}, recipe.adapter.quantize == "none"),
    ]
    return [keys for keys, holds in rows if holds]
