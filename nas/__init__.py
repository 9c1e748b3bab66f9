"""Architecture search under private inference: `nas.Study(...).run()`, `nas.load_run(folder)`, and the commands.

The names below are imported when first used, so that `import nas` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nas.api import Callback, Run, Study, load_run
    from nas.run.ledger import Record
    from nas.run.members import TrainedMember

__all__ = ["Callback", "Record", "Run", "Study", "TrainedMember", "load_run"]

_MODULES = {"Record": "nas.run.ledger", "TrainedMember": "nas.run.members"}  # of names that nas.api does not define


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "nas.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
