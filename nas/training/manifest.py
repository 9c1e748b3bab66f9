"""The record of a training in a folder of `nas.train`, next to its checkpoints: enough to export the model."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from costmodel.config.files import dump, load_file
from nas.corpus.corpus import tokenizer_folder
from nas.corpus.documents import Reading
from nas.corpus.ngrams import NgramBaseline
from nas.corpus.tokenizer import TOKENIZER_FILE
from nas.provenance import SCHEMA_VERSION
from nas.recipe.candidate import Candidate, canonical_candidate
from nas.storage import replace_file

TRAINING_FILE = "training.yaml"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingManifest:
    """The candidate and data of a training.

    corpus: fingerprint of the data. tokenizer, split: their names; perplexities are of this split. created:
        time in UTC, ISO 8601. versions: versions of packages by name. command: arguments of `python -m nas.train`.
        ngrams: n-gram baselines on the same tokens, or None. begin_of_text: the token that begins each sequence, or
        None. source: digest of the initial weights (`digest_of`); None if they are random. read: what was read of
        folders of text, and what was left out.
    """

    schema_version: int = SCHEMA_VERSION
    candidate: Candidate
    seed: int
    corpus: str
    tokenizer: str
    split: str
    created: str
    versions: dict[str, str]
    command: tuple[str, ...] = ()
    ngrams: NgramBaseline | None = None
    begin_of_text: str | None = None
    source: str | None = None
    read: tuple[Reading, ...] = ()


def is_training(folder: Path) -> bool:
    """Whether the folder has a manifest of `nas.train`."""
    return os.path.isfile(folder / TRAINING_FILE)


def training_tokenizer(folder: Path, corpus: str) -> Path:
    """Return the folder of a training's tokenizer: in `folder`, or else in the cache. corpus: fingerprint."""
    own = folder / TOKENIZER_FOLDER
    return own if (own / TOKENIZER_FILE).is_file() else tokenizer_folder(corpus)


def write_training(folder: Path, training: TrainingManifest) -> None:
    """Write the manifest of a training into its folder. Raises OSError."""
    data = asdict(training) | {"candidate": canonical_candidate(training.candidate)}
    replace_file(folder / TRAINING_FILE, dump(data))


def read_training(folder: Path) -> TrainingManifest:
    """Return a folder's manifest. Raises UserError if the file is missing, damaged or of another schema version."""
    return load_file(TrainingManifest, folder / TRAINING_FILE)
