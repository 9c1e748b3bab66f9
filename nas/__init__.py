"""Architecture search under private inference: `nas.Study(...).run()`, `nas.load_run(folder)`, and the commands.

The names below are imported when they are first used, so that `import nas` costs nothing.
"""

from typing import TYPE_CHECKING

from costmodel.config.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
