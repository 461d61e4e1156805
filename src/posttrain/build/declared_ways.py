"""How a run samples and learns, in one line: each part declares its way, and here it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from posttrain.build.setup import WORTH_COMPILING, Setup, choose_compile
from posttrain.fast.score import compilable
from posttrain.learn.learning_way import SHARDED
from posttrain.models.quiet import compiler_remarks
from posttrain.protocols import Engine, Learner
from posttrain.runs import write_json
from posttrain.runs.keeper import Keeper
from posttrain.types.ways import Missing, Support, Way

# benchmarks/rollout.py and benchmarks/learning.py, docs/benchmarks.md
UNCOMPILED = (
    "sampling is about 1.9 and learning 2.9 times slower (measured with 135M weights on an H200)"
)
_WORDS = {"samples": "sampling", "learns": "learning"}


def declared(
    setup: Setup, learner: Learner, *, longest: int, engine: Engine | None = None
) -> dict[str, Way]:
    """The ways of a stage whose sequences have at most ``longest`` tokens, by what is done so.

    ``engine`` is that of a stage that samples.
    """
    learns = own_way(learner, longest)
    if engine is None:
        return {"learns": learns}
    recipe, model = setup.recipe, setup.policy.model
    device = model.device.type
    compiled = choose_compile(recipe, device)
    if compiled:
        sharded = any(missing.why == SHARDED for missing in learns.without)
        verdict = Support(SHARDED) if sharded else compilable(model)
        asked = Way.of(wanted=[("compiled layers", verdict, "they run as written")])
        learns = Way(uses=learns.uses + asked.uses, without=learns.without + asked.without)
    samples = own_way(engine)
    if device == "cuda" and not compiled:
        why = "model.compile is false"
        if recipe.model.compile == "auto":
            why = f"[rl] samples below {WORTH_COMPILING:,} tokens, and model.compile is not set"
        lost = Missing(what="compilation", why=why, cost=UNCOMPILED, chosen=True)
        samples = Way(uses=samples.uses, without=(*samples.without, lost))
    return {"samples": samples, "learns": learns}


def own_way(part: Engine | Learner, *asked: int) -> Way:
    """The way that an engine or a learner declares; one without a declaration is named."""
    declare = getattr(part, "way", None)
    found = declare(*asked) if callable(declare) else None
    return found if isinstance(found, Way) else Way(uses=(f"as {type(part).__name__} does",))


def told(ways: Mapping[str, Way]) -> str:
    """All ways in one line.

    >>> told({"samples": Way(uses=("slots", "CUDA graphs")), "learns": Way(uses=("packed",))})
    'sampling: slots, CUDA graphs; learning: packed'
    """
    return "; ".join(f"{_WORDS[what]}: {way}" for what, way in ways.items())


class Ways:
    """The ways of a stage: told and written down at its start, and again where one has changed."""

    def __init__(self, keeper: Keeper, ask: Callable[[], Mapping[str, Way]]) -> None:
        self._keeper, self._ask = keeper, ask
        self._known: Mapping[str, Way] = {}
        self._remarks: list[str] = []
        self.look()

    def look(self) -> None:
        """Ask the parts: what cannot be captured or compiled shows only once it was tried."""
        ways, remarks = self._ask(), list(compiler_remarks)
        if (ways, remarks) == (self._known, self._remarks):
            return
        line = told(ways)
        if ways != self._known:  # the compiler's remarks are warnings, and told by now
            fell_back = any(way.fell_back for way in ways.values())
            (self._keeper.warn if fell_back else self._keeper.info)(line)
        self._known, self._remarks = ways, remarks
        record = {what: asdict(way) for what, way in ways.items()}
        write_json(self._keeper.folder.ways, {"line": "; ".join([line, *remarks]), **record})
