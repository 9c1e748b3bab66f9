"""Searchers by name, or by module and class. Those of a name are imported when they are first wanted."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from costmodel.errors import UserError
from nas.searchers.strategy import SearchProblem, Strategy

SEARCHERS: dict[str, str] = {
    "trellis": "nas.searchers.trellis.trellis:Trellis",
    "evolution": "nas.searchers.evolution:Evolution",
    "stratified": "nas.searchers.uniform:Stratified",
    "uniform": "nas.searchers.uniform:Uniform",
    "ladder": "nas.searchers.uniform:Ladder",
    "nsga2": "nas.searchers.optuna_samplers:Nsga2",
    "tpe": "nas.searchers.optuna_samplers:Tpe",
    "gp": "nas.searchers.optuna_samplers:GaussianProcess",
}


def check_searcher(name: str) -> None:
    """Raises UserError unless this is a name of `SEARCHERS` or has the form `module:Class`, which is not imported."""
    if name not in SEARCHERS and ":" not in name:
        raise UserError(
            f"--searcher must be one of {', '.join(SEARCHERS)}, or module:Class of your own, but got {name!r:.80}."
        )


def searcher_of(name: str) -> Callable[[SearchProblem], Strategy]:
    """What makes the searcher of a name. Raises UserError as `check_searcher`, or if it is no `Strategy`."""
    check_searcher(name)
    made = _loaded(SEARCHERS.get(name, name))
    if not (isinstance(made, type) and issubclass(made, Strategy)):
        raise UserError(f"--searcher {name!r:.80} must be a subclass of nas.searchers.strategy.Strategy, but is not.")
    return made


def _loaded(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--searcher {path!r:.80} cannot be loaded: {error}.") from None
