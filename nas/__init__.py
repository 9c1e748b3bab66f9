"""Architecture search under private inference: `nas.Study(...).run()`, `nas.load_run(folder)`, and the commands.

The names below are imported when they are first used, so that `import nas` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nas.results.ledger import Record
    from nas.results.members import TrainedMember
    from nas.runs.callbacks import Callback
    from nas.runs.run import Run, load_run
    from nas.runs.study import Study

__all__ = ["Callback", "Record", "Run", "Study", "TrainedMember", "load_run"]

_MODULES = {
    "Callback": "nas.runs.callbacks",
    "Record": "nas.results.ledger",
    "Run": "nas.runs.run",
    "Study": "nas.runs.study",
    "TrainedMember": "nas.results.members",
    "load_run": "nas.runs.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
