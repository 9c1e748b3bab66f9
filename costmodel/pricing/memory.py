"""Memory of a party while a model is run: the most of all runs, and op by op."""

from collections.abc import Sequence

from costmodel.estimate import Pricer
from costmodel.execution.memory import PeakMemory, alive_bytes, committed, held_bytes, load_memory, peak_memory
from costmodel.ops import OpGraph
from costmodel.protocols.derived import Derived


def most_memory(runs: Sequence[OpGraph], pricer: Pricer) -> PeakMemory | None:
    """Of the run that needs the most, the first or the last; None for a protocol that no engine runs."""
    if not isinstance(pricer, Derived):
        return None
    testbed = load_memory(committed(pricer.protocol))
    found = [peak_memory(run, pricer.setting, testbed) for run in (runs[0], runs[-1])]
    return max((each for each in found if each is not None), key=lambda each: each.party_bytes, default=None)


def held_by_op(graph: OpGraph, pricer: Pricer) -> list[float | None]:
    """Bytes of shares that a party holds while each op is run; None where no engine runs it."""
    if not isinstance(pricer, Derived):
        return [None for _ in graph]
    stored = held_bytes(graph, pricer.protocol, pricer.setting)
    return [stored + each for each in alive_bytes(graph, pricer.protocol, pricer.setting)]
