"""Which nodes of a cluster train, and which are left out: decisions alone, without Ray or clock.

A node is asked before its first trial whether it has this code, the run's folder, the corpus and a GPU. It is left out
if it answers that it cannot train, or if QUICK_FAILURES trials in a row fail on it within QUICK_S; that only as long as
another node is left, since where none is, the trials are to blame. A trial that failed on a node is tried on others, on
MOST_NODES in all.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from nas.corpus.corpus import Corpus
from nas.provenance import versions
from nas.run.folder import CONFIG_FILE
from nas.study.finalists import Key

PACKAGES = ("costmodel", "nas", "search_spaces")  # beside one another, wherever they are installed
PROBE_FILE = ".node-"  # in the run's folder, one for each node that is asked
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
        """Returns the line to log."""
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
        """A trial has ended on a node; the line to log if the node is left out for it."""
        self._quick[node_id] = self._quick[node_id] + 1 if failed and seconds < QUICK_S else 0
        node = self.admitted.get(node_id)
        if node is None or len(self.admitted) == 1 or self._quick[node_id] < QUICK_FAILURES:
            return None
        return self.leave_out(
            node, f"{QUICK_FAILURES} trials in a row failed on it within {QUICK_S:.0f} s each, the last: {reason}"
        )


@cache
def source_digest() -> str:
    """Digests every Python file of the packages, to twelve hexadecimal digits."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The needs of a run's trials, which a node is asked for; plain data.

    device: cpu or cuda. second: the second corpus, or None. sources: digest of the code of the process that asks.
    """

    folder: Path
    corpus: Corpus
    device: str
    second: Corpus | None = None
    sources: str = field(default_factory=source_digest)
    versions: dict[str, str] = field(default_factory=versions)


def problem(asked: Question, node_id: str) -> str | None:
    """Why no trial can run in this process, or None. Leaves a file in the run's folder, which the asker looks for."""
    present = versions()
    for name, version in asked.versions.items():
        if present.get(name) != version:
            return f"it has {name} {present.get(name)}, not {version}"
    if (digest := source_digest()) != asked.sources:
        return f"its copy of this package is another one ({digest}, not {asked.sources})"
    try:
        (asked.folder / CONFIG_FILE).read_bytes()
        probe_file(asked.folder, node_id).write_text(node_id)
    except OSError as error:
        return f"run folder {asked.folder} cannot be read and written there: {error.strerror}"
    corpus = asked.corpus
    try:
        int(corpus.tokens("train")[-1])
        for corpus in filter(None, (asked.corpus, asked.second)):
            int(corpus.tokens("validation")[-1])
    except (OSError, ValueError) as error:
        return f"corpus {corpus.folder} is not there: {error}"
    return _gpu_problem() if asked.device == "cuda" else None


def probe_file(folder: Path, node_id: str) -> Path:
    """Where a node writes, so that whoever asked it sees that the folder is one and the same."""
    return folder / f"{PROBE_FILE}{node_id}"


def _gpu_problem() -> str | None:
    try:
        ones = torch.ones(8, 8, device="cuda")
        computed = float((ones @ ones).sum())
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        return f"its GPU does not compute: {' '.join(str(error).split()):.200}"
    return None if computed == 512.0 else f"its GPU computes {computed} for 512"
