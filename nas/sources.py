"""Where training text comes from, as documents already split into train and validation.

A document is one file, one line of a .jsonl or one row of a table. The split is decided by a hash (of the relative
path for files, of the text for rows), so that it never depends on order or on what else is there; exact copies of a
file are read once and rows with equal text fall on one side, so that nothing validated was trained on.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "validation"]

VALIDATION_SHARE = 0.05  # of files or rows: about 90,000 tokens of the standard library
TEXT_SUFFIXES = (".txt", ".py", ".md")
TEXT_FIELDS = ("text", "content")

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
    """A dataset of the Hugging Face hub. validation: its own repository, or None to split the train one by hash."""

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

    Raises ValueError, in one line, for anything else and for a source that cannot be read or reached.
    """
    if data == "stdlib":
        return _files_source("stdlib", Path(sysconfig.get_paths()["stdlib"]), _stdlib_files)
    if data in HUB_DATASETS:
        return _hub_source(data, HUB_DATASETS[data])
    path = Path(data)
    if path.is_dir():
        return _files_source(data, path, _text_files)
    if path.is_file() and path.suffix in _FILE_SOURCES:
        return _FILE_SOURCES[path.suffix](data, path)
    raise ValueError(
        f"data must be stdlib, {', '.join(HUB_DATASETS)}, a folder of {', '.join(TEXT_SUFFIXES)} files, or a "
        f"{', '.join(_FILE_SOURCES)} file, but got {data!r}, which is none of these."
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


def _text_files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())


def _files_source(name: str, folder: Path, list_files: Callable[[Path], Iterable[Path]]) -> Source:
    """Every UTF-8 file once, by relative path; of exact copies the first."""
    texts: dict[str, tuple[str, str]] = {}  # digest of the contents -> relative path, text
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in list_files(folder)):
        raw = _read(path)
        try:
            texts.setdefault(hashlib.sha256(raw).hexdigest(), (relative, raw.decode("utf-8")))
        except UnicodeDecodeError:
            continue  # not text
    manifest = json.dumps([[relative, digest] for digest, (relative, _) in texts.items()])

    def documents(split: Split) -> Iterator[str]:
        return (text for relative, text in texts.values() if is_validation(relative) == (split == "validation"))

    return Source(name=name, fingerprint=_sha256(manifest.encode()), documents=documents)


def _txt_source(name: str, path: Path) -> Source:
    """One document: the first lines are trained on, the last ones held out."""
    raw = _read(path)
    lines = _decoded(raw, path).splitlines(keepends=True)
    cut = len(lines) - round(VALIDATION_SHARE * len(lines))
    halves: dict[Split, str] = {"train": "".join(lines[:cut]), "validation": "".join(lines[cut:])}
    return Source(name=name, fingerprint=_sha256(raw), documents=lambda split: iter([halves[split]]))


def _jsonl_source(name: str, path: Path) -> Source:
    raw = _read(path)
    texts = [_text_of(line, path, number) for number, line in enumerate(_decoded(raw, path).splitlines(), 1) if line]
    return Source(name=name, fingerprint=_sha256(raw), documents=partial(_by_text, texts))


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} must be a JSON object, but cannot be parsed: {error.msg}.") from None
    texts = [row[field] for field in TEXT_FIELDS if field in row] if isinstance(row, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise ValueError(f"{path}, line {number} must be a JSON object with a text in {' or '.join(TEXT_FIELDS)!r}.")
    return texts[0]


def _parquet_source(name: str, path: Path) -> Source:
    rows = _datasets().load_dataset("parquet", data_files=str(path), split="train")
    fields = [field for field in TEXT_FIELDS if field in rows.column_names]
    if not fields:
        raise ValueError(f"{path} must have a column {' or '.join(TEXT_FIELDS)!r}, but has {rows.column_names}.")
    fingerprint = _sha256(_read(path))
    return Source(name=name, fingerprint=fingerprint, documents=lambda split: _by_text(rows[fields[0]], split))


_FILE_SOURCES: dict[str, Callable[[str, Path], Source]] = {
    ".txt": _txt_source,
    ".jsonl": _jsonl_source,
    ".parquet": _parquet_source,
}


def _hub_source(name: str, dataset: HubDataset) -> Source:
    """Documents streamed from the hub, at the revision it has now."""
    datasets = _datasets()
    repositories = [dataset.train] + ([dataset.validation] if dataset.validation else [])
    try:
        from huggingface_hub import HfApi

        revisions = {one: str(HfApi().dataset_info(one).sha) for one in repositories}
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise ValueError(
            f"data {name!r} ({dataset.train}) cannot be reached on the Hugging Face hub "
            f"({type(error).__name__}); check the connection or give the path of a local copy."
        ) from None

    def rows(repository: str) -> Iterator[str]:
        stream = datasets.load_dataset(repository, revision=revisions[repository], split="train", streaming=True)
        return (row[dataset.field] for row in stream)

    def documents(split: Split) -> Iterator[str]:
        if dataset.validation is None:
            return _by_text(rows(dataset.train), split)
        return rows(dataset.train if split == "train" else dataset.validation)

    return Source(name=name, fingerprint=_sha256(json.dumps(revisions).encode()), documents=documents)


def _by_text(texts: Iterable[str], split: Split) -> Iterator[str]:
    return (text for text in texts if is_validation(text) == (split == "validation"))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("this data needs the package `datasets`; install it with pip install '.[hf]'.") from None
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
