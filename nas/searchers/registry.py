"""Searchers by name, or by module and class."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from costmodel.errors import UserError
from nas.searchers.evolution import Evolution
from nas.searchers.optuna_samplers import SAMPLERS, optuna_strategy
from nas.searchers.strategy import SearchProblem, Strategy
from nas.searchers.trellis.trellis import Trellis
from nas.searchers.uniform import Ladder, Stratified, Uniform

SEARCHERS: dict[str, Callable[[SearchProblem], Strategy]] = {
    "trellis": Trellis,
    "evolution": Evolution,
    "stratified": Stratified,
    "uniform": Uniform,
    "ladder": Ladder,
    **{name: partial(optuna_strategy, name) for name in SAMPLERS},
}
FORMER_NAMES = {"random": "stratified"}  # in runs from before there was uniform


def searcher_of(name: str) -> Callable[[SearchProblem], Strategy]:
    """What makes the searcher: a name of `SEARCHERS`, or `module:Class` of one of your own.

    Raises UserError if there is none, or the class is no `Strategy`.
    """
    if (known := FORMER_NAMES.get(name, name)) in SEARCHERS:
        return SEARCHERS[known]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(
            f"--searcher must be one of {', '.join(SEARCHERS)}, or module:Class of your own, but got {name!r:.80}."
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--searcher {name!r:.80} cannot be loaded: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UserError(
            f"--searcher {name!r:.80} must be a subclass of nas.searchers.strategy.Strategy, but is {found!r:.80}."
        )
    return found
