"""Predicts the cost of every step of a session by the formulas of its protocol."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.engine.registry import walk
from costmodel.network import Network
from costmodel.ops import OpGraph
from costmodel.protocols import derived
from costmodel.protocols.derived import Derived, seconds_of
from costmodel.protocols.primitives import Comm, EngineSetting, total_comm


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted cost of one step; bytes and messages are summed over parties and include its preprocessing.

    `seconds` are on the committed testbed and a network; None if the testbed was measured in another setting.
    """

    sent_bytes: int
    messages: int
    seconds: float | None


def predictions(
    steps: Sequence[OpGraph], protocol: str, setting: EngineSetting, network: str | Network
) -> tuple[Prediction, ...]:
    """Return the prediction of every step, in the order in which one session runs them.

    Raise UserError if the protocol lacks the setting, an op has no formula, or the ring is too small for an op.
    """
    # each preprocessing counts in the step that needs it, and the making of kept masks in the first
    first = total_comm(walk(protocol, [node.op for node in steps[0]], setting.of_first_run))
    by_op = iter(walk(protocol, [node.op for graph in steps for node in graph], setting))
    comms = [first, *[total_comm(next(by_op) for _ in graph) for graph in steps][1:]]
    pricer = derived.load_if_measured(protocol, network, setting)
    return tuple(
        Prediction(
            sent_bytes=comm.sent_bytes,
            messages=comm.messages,
            seconds=None if pricer is None else _seconds(graph, comm, pricer, starts=index == 0),
        )
        for index, (graph, comm) in enumerate(zip(steps, comms, strict=True))
    )


def _seconds(graph: OpGraph, comm: Comm, pricer: Derived, *, starts: bool) -> float:
    """Return seconds as `Derived.price` does, but with this step's preprocessing; `starts` marks the first step."""
    computing_s = sum(seconds_of(node.op, pricer.setting.weights, pricer.testbed) for node in graph)
    return computing_s + pricer.wire_s(comm) + (pricer.testbed.start_s if starts else 0.0)
