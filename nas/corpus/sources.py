"""Finds training text: from a name or path to a source of documents. The Hugging Face hub needs the extra `hf`."""

import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from costmodel.config.files import MOST_JSON, read_bytes, read_text
from costmodel.errors import UserError
from nas.corpus import local_files
from nas.corpus.documents import (
    SPLITS,
    Batch,
    Document,
    DocumentSource,
    GivenTokenizer,
    Split,
    Stream,
    fingerprint,
    in_batches,
)
from nas.corpus.foreign_tokenizer import to_json
from nas.corpus.local_files import FILE_SUFFIXES
from nas.corpus.rows import ROW_READERS, kind_of
from nas.corpus.tokenizer import TOKENIZER_FILE

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperCorpus:
    """A corpus of the papers.

    hub: names of the repositories of `train`, `validation` and `tokenizer` on the Hugging Face hub; None if the corpus
        cannot be downloaded. withdrawn: the reason for that. vocab_size: that of its tokenizer. end_of_text: the token
        after a document. tokenizer_file: name of the tokenizer's file in a local copy. chunked: whether each document
        is cut into sequences, and the rest of it dropped.
    """

    hub: dict[str, str] | None
    withdrawn: str = ""
    vocab_size: int
    end_of_text: str
    tokenizer_file: str = TOKENIZER_FILE
    chunked: bool


HUB_FIELD = "content"  # the column of texts
PAPER_CORPORA: dict[str, PaperCorpus] = {
    # arXiv 2410.13060, section 4; chunks as in its training code
    "codeparrot": PaperCorpus(
        hub={
            "train": "huggingface-course/codeparrot-ds-train",
            "validation": "huggingface-course/codeparrot-ds-valid",
            "tokenizer": "huggingface-course/code-search-net-tokenizer",
        },
        vocab_size=50_000,
        end_of_text="<|endoftext|>",
        chunked=True,
    ),
    # Stanic et al. 2023, arXiv 2309.11197; tokenizer and document token as in github.com/languini-kitchen
    "languini": PaperCorpus(
        hub=None,
        withdrawn="its books are a part of Books3, which was withdrawn for copyright and has no repository any more",
        vocab_size=16_384,
        end_of_text="<D>",
        tokenizer_file="books_16384.model",
        chunked=False,
    ),
}


def open_source(data: str, *, sample: int | None = None) -> DocumentSource:
    """Open a source of documents.

    data: `stdlib`, `codeparrot`, a path, or NAME:FOLDER for a local copy of `codeparrot` or `languini`. sample: for a
    file or folder, cut no text and ignore names that state a split; of a folder with more than so many bytes, only some
    files are read, chosen by the hashes of their names. Raises UserError, in one line, for any other `data` and for a
    source that cannot be read or reached; damaged rows raise it only when they are reached.
    """
    name, colon, folder = data.partition(":")
    if name in PAPER_CORPORA:
        corpus = PAPER_CORPORA[name]
        return _copy_source(data, corpus, Path(folder)) if colon else _hub_source(name, corpus)
    if not data:
        raise UserError(f"data must be stdlib, {', '.join(PAPER_CORPORA)} or a path, but is empty.")
    if data == "stdlib":
        return local_files.stdlib_source()
    path = Path(data)
    if os.path.isdir(path):
        return local_files.folder_source(data, path, sample=sample)
    if os.path.isfile(path) and kind_of(path) in (".txt", *ROW_READERS):
        return local_files.file_source(data, path, whole=sample is not None)
    raise UserError(
        f"data must be stdlib, {', '.join(PAPER_CORPORA)}, NAME:FOLDER for a local copy of these, "
        f"a folder of {', '.join(FILE_SUFFIXES)} files, or a "
        f"{', '.join(('.txt', *ROW_READERS))} file, but got {data!r}, which is none of these."
    )


def _hub_source(name: str, corpus: PaperCorpus) -> DocumentSource:
    remedy = (
        f"put train and validation (folders of {', '.join(FILE_SUFFIXES)} files) and the tokenizer as "
        f"{corpus.tokenizer_file} in a FOLDER and give {name}:FOLDER"
    )
    if corpus.hub is None:
        raise UserError(f"data {name!r} cannot be downloaded: {corpus.withdrawn}; if you have a copy, {remedy}.")
    repositories = {split: reach(corpus.hub[split], "dataset", remedy) for split in reversed(SPLITS)}
    streams = tuple(hub_stream(repository, HUB_FIELD, split) for split, repository in repositories.items())
    content = [*(list(repositories[split][:2]) for split in SPLITS), HUB_FIELD]
    tokenizer = corpus.hub["tokenizer"]
    return _paper_source(
        name, corpus, streams, content, lambda: hub_file(reach(tokenizer, "model", remedy), TOKENIZER_FILE)
    )


def _copy_source(data: str, corpus: PaperCorpus, folder: Path) -> DocumentSource:
    splits = tuple(reversed(SPLITS))
    for path in (folder / split for split in splits):
        if not os.path.isdir(path):
            raise UserError(f"data {data!r} must be a folder with texts in {path}, but there is no such folder.")
    listings = [local_files.listed(folder / split, split) for split in splits]
    streams = tuple(local_files.file_stream(part.files, split) for part, split in zip(listings, splits, strict=True))

    def read_tokenizer() -> str:
        path = folder / corpus.tokenizer_file
        try:
            if path.suffix == ".model":
                return to_json(read_bytes(path, MOST_JSON))
            return read_text(path, MOST_JSON)
        except UserError as error:
            reason = str(error).removeprefix(f"{path} cannot be read: ")
            raise UserError(f"data {data!r} must hold the tokenizer {path}: {reason}") from None

    source = _paper_source(data, corpus, streams, [part.content for part in listings], read_tokenizer)
    return replace(source, read=tuple(part.read for part in listings if part.read is not None))


def _paper_source(
    name: str, corpus: PaperCorpus, streams: tuple[Stream, ...], content: object, read_tokenizer: Callable[[], str]
) -> DocumentSource:
    """Use the paper's tokenizer if it fits into the vocabulary. content: everything that the documents depend on."""

    def tokenizer(vocab_size: int) -> GivenTokenizer | None:
        if vocab_size < corpus.vocab_size:
            return None  # a smaller one must be trained
        kind = name.partition(":")[0]
        return GivenTokenizer(name=kind, json=read_tokenizer(), end_of_text=corpus.end_of_text)

    return DocumentSource(
        name=name, fingerprint=fingerprint(content), streams=streams, tokenizer=tokenizer, chunked=corpus.chunked
    )


class Repository(NamedTuple):
    """A repository on the hub, or a folder (revision `local`). remedy: advice in the message if it cannot be read."""

    name: str
    revision: str
    remedy: str


def reach(name: str, kind: str, remedy: str) -> Repository:
    """Return a repository at its current commit, or a folder. name: OWNER/NAME or a path. kind: `dataset` or `model`.

    Raises UserError, in one line that ends with `remedy`, if the extra is missing or the repository cannot be reached.
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
    """Return a stream of the texts in column `field` of a dataset, downloaded as they are read.

    The split `train` of the dataset is read, and its documents get the split `split`. Positions are states of the
    dataset. Reading raises UserError if the hub cannot be reached, or the dataset lacks the column.
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
    """Return the text of a file in a model's repository, or in a folder. Raises UserError if it cannot be read."""
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
