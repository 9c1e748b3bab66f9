"""Where training text comes from, as documents already split into train and validation.

A document is one file of text, one line of a .jsonl or one row of a .parquet. The split is decided by a hash (of the
relative path for files, of the text for rows), so that it never depends on order or on what else is there; exact
copies of a file are read once and rows with equal text fall on one side, so that nothing validated was trained on.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nas.rows import ROW_READERS

T = TypeVar("T")

Split = Literal["train", "validation"]

VALIDATION_SHARE = 0.05  # of files or rows: about 90,000 tokens of the standard library
FILE_SUFFIXES = (".txt", ".py", ".md", *ROW_READERS)

# Not code that a model should learn from: tests, bundled packages, and tables that repeat each other line by line.
STDLIB_EXCLUDED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "site-packages",
        "dist-packages",
        "turtledemo",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents of a corpus.

    name: as the user asked for it. fingerprint: hexadecimal SHA-256 of everything the documents depend on.
    documents: the texts of a split, in an order that is always the same.
    """

    name: str
    fingerprint: str
    documents: Callable[[Split], Iterator[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset of the Hugging Face hub. validation: its own repository, or None to split the train one by hash.

    No test reads one, as that needs the network. Nobody has trained on `languini` with this code: its repository is
    unverified and has probably been withdrawn; give the path of a local copy instead.
    """

    train: str
    validation: str | None
    field: str


HUB_DATASETS: dict[str, HubDataset] = {
    # arXiv 2410.13060, section 4
    "codeparrot": HubDataset(
        train="huggingface-course/codeparrot-ds-train",
        validation="huggingface-course/codeparrot-ds-valid",
        field="content",
    ),
    # Stanic et al. 2023, arXiv 2309.11197: the books of Languini Kitchen
    "languini": HubDataset(train="the_pile_books3", validation=None, field="text"),
}


def open_source(data: str) -> Source:
    """The source named `stdlib`, `codeparrot`, `languini` or by a path.

    Raises ValueError, in one line, for anything else and for a source that cannot be read or reached; rows that
    cannot be read raise it when they are reached.
    """
    if not data:
        raise ValueError("data must be stdlib, codeparrot, languini or a path, but is empty.")
    if data == "stdlib":
        return _files_source("stdlib", Path(sysconfig.get_paths()["stdlib"]), _stdlib_files)
    if data in HUB_DATASETS:
        return _hub_source(data, HUB_DATASETS[data])
    path = Path(data)
    if path.is_dir():
        return _files_source(data, path, _known_files)
    if path.is_file() and path.suffix == ".txt":
        return _txt_source(data, path)
    if path.is_file() and path.suffix in ROW_READERS:
        return _rows_source(data, path)
    raise ValueError(
        f"data must be stdlib, {', '.join(HUB_DATASETS)}, a folder of {', '.join(FILE_SUFFIXES)} files, or a "
        f"{', '.join(('.txt', *ROW_READERS))} file, but got {data!r}, which is none of these."
    )


def is_validation(key: str) -> bool:
    """Whether the document with this key (a relative path or its text) is held out for validation."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def _stdlib_files(folder: Path) -> Iterable[Path]:
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if STDLIB_EXCLUDED.isdisjoint(relative.parts) and not relative.name.startswith("_sysconfigdata"):
            yield path


def _known_files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.suffix in FILE_SUFFIXES and path.is_file())


def _files_source(name: str, folder: Path, list_files: Callable[[Path], Iterable[Path]]) -> Source:
    """Every UTF-8 text once, by relative path, then every file of rows once; of exact copies the first."""
    texts: dict[str, tuple[str, str]] = {}  # digest of the contents -> relative path, text
    tables: dict[str, tuple[str, Path]] = {}  # the same of files that are read row by row
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in list_files(folder)):
        if path.suffix in ROW_READERS:
            tables.setdefault(_digest(path), (relative, path))
            continue
        raw = _read(path)
        try:
            texts.setdefault(_sha256(raw), (relative, raw.decode("utf-8")))
        except UnicodeDecodeError:
            continue  # not text
    if not tables and not any(text for _, text in texts.values()):
        raise ValueError(f"{folder} must hold text in {', '.join(FILE_SUFFIXES)} files (UTF-8), but there is none.")
    manifest = [[relative, digest] for files in (texts, tables) for digest, (relative, _) in files.items()]

    def documents(split: Split) -> Iterator[str]:
        held_out = split == "validation"
        yield from (text for relative, text in texts.values() if is_validation(relative) == held_out)
        for _, path in tables.values():
            yield from _by_text(ROW_READERS[path.suffix](path), split)

    return Source(name=name, fingerprint=_fingerprint(manifest), documents=documents)


def _txt_source(name: str, path: Path) -> Source:
    """One document: the first lines are trained on, the last ones held out."""
    raw = _read(path)
    lines = _decoded(raw, path).splitlines(keepends=True)
    cut = len(lines) - round(VALIDATION_SHARE * len(lines))
    halves: dict[Split, str] = {"train": "".join(lines[:cut]), "validation": "".join(lines[cut:])}
    return Source(
        name=name, fingerprint=_fingerprint([".txt", _sha256(raw)]), documents=lambda split: iter([halves[split]])
    )


def _rows_source(name: str, path: Path) -> Source:
    texts = ROW_READERS[path.suffix]
    fingerprint = _fingerprint([path.suffix, _digest(path)])
    return Source(name=name, fingerprint=fingerprint, documents=lambda split: _by_text(texts(path), split))


def _hub_source(name: str, dataset: HubDataset) -> Source:
    """Documents streamed from the hub, at the revision it has now."""
    datasets = _datasets()
    repositories = [dataset.train] + ([dataset.validation] if dataset.validation else [])
    revisions = {one: _reached(name, one, _revision) for one in repositories}

    def rows(repository: str) -> Iterator[str]:
        def stream(repository: str) -> Any:
            return datasets.load_dataset(repository, revision=revisions[repository], split="train", streaming=True)

        stored = iter(_reached(name, repository, stream))
        while (row := _reached(name, repository, lambda _: next(stored, None))) is not None:
            yield row[dataset.field]

    def documents(split: Split) -> Iterator[str]:
        if dataset.validation is None:
            return _by_text(rows(dataset.train), split)
        return rows(dataset.train if split == "train" else dataset.validation)

    return Source(name=name, fingerprint=_fingerprint([revisions, dataset.field]), documents=documents)


def _revision(repository: str) -> str:
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(repository).sha)


def _reached(name: str, repository: str, action: Callable[[str], T]) -> T:
    """What the action makes of a repository of the hub. Raises ValueError if it fails."""
    try:
        return action(repository)
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise ValueError(
            f"data {name!r} needs the dataset {repository} of the Hugging Face hub, which cannot be read "
            f"({type(error).__name__}); check the connection and that it exists, or give the path of a local copy."
        ) from None


def _by_text(texts: Iterable[str], split: Split) -> Iterator[str]:
    return (text for text in texts if is_validation(text) == (split == "validation"))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("data of the hub needs the package `datasets`; install it with pip install '.[hf]'.") from None
    return datasets


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be text in UTF-8, but holds other bytes.") from None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _digest(path: Path) -> str:
    """SHA-256 of a file that may be larger than the memory."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None


def _fingerprint(content: Any) -> str:
    return _sha256(json.dumps(content).encode())
