"""Datasets and tokenizers of the Hugging Face hub or of a local folder in its place. Needs the extra `hf`."""

import os
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from costmodel.config.files import MOST_JSON, read_text
from costmodel.errors import UserError
from nas.corpus.documents import Batch, Document, Split, Stream, in_batches

T = TypeVar("T")


class Repository(NamedTuple):
    """A repository on the hub: its owner and name, its commit, and advice (`remedy`) if it cannot be read."""

    name: str
    revision: str
    remedy: str


def reach(name: str, kind: str, remedy: str) -> Repository:
    """Return a repository at its current revision. kind: `dataset` or `model`.

    Raises UserError, in one line that ends with the remedy, if the extra is missing or the hub cannot be reached.
    """
    try:
        import datasets  # noqa: F401
        from huggingface_hub import HfApi
    except ImportError:
        raise UserError(
            f"{name} of the Hugging Face hub needs the extra `hf`; install it with pip install -e '.[hf]', or {remedy}."
        ) from None
    if os.path.isdir(name):
        return Repository(name, "local", remedy)
    commit = _reached(name, remedy, lambda: HfApi().repo_info(name, repo_type=kind).sha)
    return Repository(name, str(commit), remedy)


def hub_stream(repository: Repository, field: str, split: Split) -> Stream:
    """Stream the texts in a column of a dataset, downloaded as they are read; positions are states of the dataset.

    Reading raises UserError if the hub becomes unreachable or there is no such column.
    """

    def batches(position: Any) -> Generator[Batch, None, None]:
        rows = _reached(repository.name, repository.remedy, lambda: _load(repository))
        if position is not None:
            rows.load_state_dict(position)

        def documents() -> Generator[Document, None, None]:
            with closing(iter(rows)) as stored:
                while (row := _reached(repository.name, repository.remedy, lambda: next(stored, None))) is not None:
                    if not isinstance(row.get(field), str):
                        raise UserError(
                            f"the dataset {repository.name} must have a column of texts {field!r}, but its columns "
                            f"are {', '.join(row)}."
                        )
                    yield Document(split, row[field])

        with closing(documents()) as read:
            yield from in_batches(read, rows.state_dict, lambda: None)

    return Stream(split=split, batches=batches)


def hub_file(repository: Repository, file: str) -> str:
    """Return the text of a file in a repository. Raises UserError if it cannot be read."""
    from huggingface_hub import hf_hub_download

    def read() -> str:
        if os.path.isdir(repository.name):
            return read_text(Path(repository.name) / file, MOST_JSON)
        path = hf_hub_download(repository.name, file, revision=repository.revision)
        return read_text(Path(path), MOST_JSON)

    return _reached(f"{repository.name}/{file}", repository.remedy, read)


def _load(repository: Repository) -> Any:
    import datasets

    return datasets.load_dataset(repository.name, revision=repository.revision, split="train", streaming=True)


def _reached(name: str, remedy: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise UserError(
            f"{name} of the Hugging Face hub cannot be read ({type(error).__name__}); check the connection and that "
            f"it exists, or {remedy}."
        ) from None
