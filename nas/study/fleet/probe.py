"""What a node is asked before its first trial: whether it has this code, the run's folder, the corpus and a GPU."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from nas.corpus.corpus import Corpus
from nas.provenance import versions
from nas.study.run_folder import CONFIG_FILE

PACKAGES = ("costmodel", "nas", "search_spaces")  # beside one another, wherever they are installed
PROBE_FILE = ".node-"  # in the run's folder, one for each node that is asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What trials of a run need of a node; plain data.

    sources: digest of the code that asks. device: cpu or cuda.
    """

    folder: Path
    corpus: Corpus
    sources: str
    versions: dict[str, str]
    device: str


def question(folder: Path, corpus: Corpus, device: str) -> Question:
    """What this process, which runs the study, asks of nodes."""
    return Question(folder=folder, corpus=corpus, sources=source_digest(), versions=versions(), device=device)


def problem(asked: Question, node_id: str) -> str | None:
    """Why no trial can run in this process, or None. Leaves a file in the run's folder, which the asker looks for."""
    found = versions()
    for name, version in asked.versions.items():
        if found.get(name) != version:
            return f"it has {name} {found.get(name)}, not {version}"
    if (digest := source_digest()) != asked.sources:
        return f"its copy of this package is another one ({digest}, not {asked.sources})"
    try:
        (asked.folder / CONFIG_FILE).read_bytes()
        probe_file(asked.folder, node_id).write_text(node_id)
    except OSError as error:
        return f"run folder {asked.folder} cannot be read and written there: {error.strerror}"
    try:
        for split in ("train", "validation"):
            int(asked.corpus.tokens(split)[-1])
    except (OSError, ValueError) as error:
        return f"corpus {asked.corpus.folder} is not there: {error}"
    return _gpu_problem() if asked.device == "cuda" else None


def probe_file(folder: Path, node_id: str) -> Path:
    """Where a node writes, so that whoever asked it sees that the folder is one and the same."""
    return folder / f"{PROBE_FILE}{node_id}"


@cache
def source_digest() -> str:
    """Of every Python file of the packages, twelve hexadecimal digits."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[3]
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu_problem() -> str | None:
    try:
        ones = torch.ones(8, 8, device="cuda")
        computed = float((ones @ ones).sum())
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        return f"its GPU does not compute: {' '.join(str(error).split()):.200}"
    return None if computed == 512.0 else f"its GPU computes {computed} for 512"
