"""Which nodes of a cluster train, and which are left out: decisions alone, without Ray or clock.

A node is admitted once it has answered what is asked of it (`nas.study.fleet.probe`). It is left out if it answers that
it cannot train, or if QUICK_FAILURES trials in a row fail on it within QUICK_S; that only as long as another node is
left, since where none is, the trials are to blame. A trial that failed on a node is tried on others, on MOST_NODES in
all.
"""

from collections import Counter
from dataclasses import dataclass

from nas.study.finalists import Key

QUICK_S = 30.0  # a trial that trains at all takes longer, or ends well
QUICK_FAILURES = 3  # by chance that many of what one searcher proposes may fail, seldom in a row on one node
MOST_NODES = 3  # on which the same trial fails: then it is the trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of a cluster. name: for people."""

    node_id: str
    name: str
    num_cpus: int
    num_gpus: int


class Fleet:
    """Node ids that may train, by what has happened on each so far."""

    def __init__(self) -> None:
        self.admitted: dict[str, Node] = {}
        self.left_out: dict[str, str] = {}
        self._quick: Counter[str] = Counter()
        self._failed_on: dict[Key, set[str]] = {}

    def admit(self, node: Node) -> None:
        self.admitted[node.node_id] = node

    def leave_out(self, node: Node, reason: str) -> str:
        """Returns what is to be said."""
        self.admitted.pop(node.node_id, None)
        self.left_out[node.node_id] = line = f"node {node.name} is left out: {reason}"
        return line

    def gone(self, node_id: str) -> None:
        """The cluster has lost it; should it come back, it is another one."""
        self.admitted.pop(node_id, None)

    def nodes_for(self, key: Key) -> tuple[str, ...]:
        """Where a trial may run: where it has not failed yet, if there is such a node."""
        others = set(self.admitted) - self._failed_on.get(key, set())
        return tuple(sorted(others or self.admitted))

    def may_try_again(self, key: Key, node_id: str) -> bool:
        """Whether a trial that has failed on a node is to be tried on another one."""
        failed_on = self._failed_on.setdefault(key, set())
        failed_on.add(node_id)
        return len(failed_on) < MOST_NODES and bool(set(self.admitted) - failed_on)

    def ended(self, node_id: str, *, failed: bool, seconds: float, reason: str) -> str | None:
        """A trial has ended on a node; what is to be said if that is why the node is left out now."""
        self._quick[node_id] = self._quick[node_id] + 1 if failed and seconds < QUICK_S else 0
        node = self.admitted.get(node_id)
        if node is None or len(self.admitted) == 1 or self._quick[node_id] < QUICK_FAILURES:
            return None
        return self.leave_out(
            node, f"{QUICK_FAILURES} trials in a row failed on it within {QUICK_S:.0f} s each, the last: {reason}"
        )
