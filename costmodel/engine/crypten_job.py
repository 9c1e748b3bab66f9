"""What a process of CrypTen is given, and what it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.execution.op_functions import Array
from costmodel.ops import OpGraph
from costmodel.protocols.crypten_setting import CryptenSetting

JOB, RENDEZVOUS = "job", "rendezvous"  # in the folder that the parties share; a party leaves a file named by its rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartyJob:
    """inputs: of the graph by name. weights: by `<node>.<suffix>`."""

    graph: OpGraph
    inputs: Mapping[str, Array]
    weights: Mapping[str, Array]
    setting: CryptenSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyCost:
    """Of an op. counted_bytes: what the party sent and what it received. begin_s, end_s: on the machine's clock."""

    counted_bytes: int
    rounds: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartyResult:
    logits: Array
    by_op: tuple[PartyCost, ...]
    peak_bytes: int | None
