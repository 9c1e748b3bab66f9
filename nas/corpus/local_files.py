"""Documents of local files: folders of text and tables, or a single file.

Names of files may state the split by the convention of the Hugging Face hub: `data/test-00000-of-00001.parquet` is of
the test split. Else a hash decides it, of the relative path for texts and of the text for rows, so that it depends
neither on order nor on other files, and rows of equal text are in the same split. If there are only texts, and the
hash puts all of them into one split, the end of each validates. Exact copies of a file are read once.
"""

import hashlib
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import accumulate, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from costmodel.config.files import MOST_ROWS, MOST_TEXT, open_file
from costmodel.errors import UserError
from nas.corpus.documents import (
    VALIDATION_SHARE,
    Batch,
    Document,
    DocumentSource,
    Reading,
    Split,
    Stream,
    by_hash,
    fingerprint,
    in_batches,
)
from nas.corpus.rows import ROW_READERS, kind_of, lacks_text, opened

FILE_SUFFIXES = (".txt", ".py", ".md", *ROW_READERS)

# Excluded because a model should not learn from it: tests, bundled packages, and tables with repetitive lines.
STDLIB_EXCLUDED = frozenset({
    "test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "turtledemo", "lib2to3", "encodings",
    "pydoc_data", "__pycache__",
})  # fmt: skip
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
               "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
               "evaluation": "test"}  # fmt: skip
CARD = "README.md"
CARD_KEYS = re.compile(r"^(dataset_info|configs|task_categories|task_ids|size_categories|pretty_name):", re.MULTILINE)


class File(NamedTuple):
    """A file with documents. size: in bytes. documents: function that reads and yields them."""

    size: int
    documents: Callable[[], Iterator[Document]]


class Listing(NamedTuple):
    """Files with documents. content: JSON data on which the documents depend. read: what was read of a folder."""

    files: list[File]
    content: list[Any]
    read: Reading | None = None


def stdlib_source() -> DocumentSource:
    """Return the standard library of the running Python as a source of documents."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted((path.relative_to(folder).as_posix(), path) for path in stdlib_files(folder))
    listing, _ = _listed(folder, paths, None)
    return _source("stdlib", listing)


def folder_source(name: str, folder: Path, *, sample: int | None = None) -> DocumentSource:
    """Return the texts and tables in a folder as a source. name: the source's. Raises UserError as `listed`.

    A data set's card is left out. If names state a train split, files of a test split are left out; if they also state
    a validation split, all other files are for training. Else a hash decides the split, or if it puts all files into
    one and none is a table, the end of each text validates. With `sample`, stated splits are ignored, no text is cut,
    and of a folder with more than so many bytes only some files are read, chosen by the hashes of their names.
    """
    listing = listed(folder, None, by_name=sample is None, has_card=True)
    files, content, _ = listing
    names = [relative for relative, *_ in content]
    if sample is not None:
        mixed = sorted(range(len(files)), key=lambda index: fingerprint(names[index]))
        before = accumulate((files[index].size for index in mixed), initial=0)
        chosen = sorted(index for index, num_bytes in zip(mixed, before, strict=False) if num_bytes < sample)
        some = listing._replace(files=[files[index] for index in chosen], content=[content[index] for index in chosen])
        return _source(name, some)
    validation = [relative for relative, _, *split in content if split]
    if validation:
        parts: dict[Split, list[File]] = {"validation": [], "train": []}
        for relative, file in zip(names, files, strict=True):
            parts["validation" if relative in validation else "train"].append(file)
        return _source(name, listing, *(file_stream(part, split) for split, part in parts.items()))
    is_text = all(kind_of(Path(relative)) not in ROW_READERS for relative in names)
    if not is_text or len(set(map(by_hash, names))) > 1:
        return _source(name, listing)
    warnings.warn(f"{folder} has too few files to hold some out: the end of each validates.", stacklevel=1)
    files = [_cut_file(folder / relative, relative) for relative in names]
    return _source(name, listing._replace(files=files, content=[*content, "cut"]))


def file_source(name: str, path: Path, *, whole: bool = False) -> DocumentSource:
    """Return an existing file as a source. The end of a text is its validation split; a hash decides the split of rows.

    `whole` cuts no text. Raises UserError if the file cannot be read. Damaged rows raise it only when they are
    reached.
    """
    file = File(path.stat().st_size, partial(_documents, path, path.name, None))
    if kind_of(path) in ROW_READERS:
        return _source(name, Listing([file], [path.suffix, digest(path)]))
    _decoded(path)  # refuses other encodings at once
    return _source(name, Listing([file if whole else _cut_file(path, path.name)], [".txt", digest(path)]))


def _source(name: str, listing: Listing, *streams: Stream) -> DocumentSource:
    return DocumentSource(
        name=name,
        fingerprint=fingerprint(listing.content),
        streams=streams or (file_stream(listing.files, None),),
        read=() if listing.read is None else (listing.read,),
    )


def listed(folder: Path, split: Split | None, *, by_name: bool = False, has_card: bool = False) -> Listing:
    """Return the files below a folder that hold documents.

    split: the split of all documents, or None to decide by hash. by_name: whether splits that names state are followed.
    has_card: whether a data set's card is left out. Raises UserError if there is no text or a file cannot be read;
    damaged rows raise it only when they are reached.
    """
    files, left_out = files_below(folder)
    kinds = {relative: kind_of(path) for relative, path in files}
    stated = [relative for relative, kind in kinds.items() if kind == ".txt" or kind in ROW_READERS]
    splits = splits_by_name(stated) if by_name else {}
    paths = []
    for relative, path in files:
        if kinds[relative] not in FILE_SUFFIXES:
            left_out.append((f"of kind {kinds[relative]}" if kinds[relative] else "without a suffix", relative))
        elif splits.get(relative) == "test":
            left_out.append(("of a test split", relative))
        elif reason := lacks_text(path):
            left_out.append((reason, relative))
        else:
            paths.append((relative, path))
    if has_card:
        are_tables = {relative: kinds[relative] in ROW_READERS for relative, _ in paths}
        for relative, path in [each for each in paths if each[1].name == CARD]:
            others = {other: is_table for other, is_table in are_tables.items() if other != relative}
            if is_card(relative, _read(path).decode("utf-8", "replace"), others):
                paths.remove((relative, path))
                left_out.append(("of a data set's card", relative))
    held_out = {relative for relative, _ in paths if splits.get(relative) == "validation"}
    listing, unused = _listed(folder, paths, split, held_out)
    names = [relative for relative, *_ in listing.content]
    shown = {name: f"{kinds[name]} of its validation split" if name in held_out else kinds[name] for name in names}
    sizes = [(shown[name], file.size) for name, file in zip(names, listing.files, strict=True) if file.size]
    left_out += unused
    reasons, first = Counter(reason for reason, _ in left_out), dict(reversed(left_out))
    read = Reading(
        folder=str(folder),
        read=dict(sorted(Counter(kind for kind, _ in sizes).items())),
        num_bytes=sum(size for _, size in sizes),
        left_out={reason: (count, first[reason]) for reason, count in sorted(reasons.items())},
    )
    return listing._replace(read=read)


def file_stream(files: Sequence[File], split: Split | None) -> Stream:
    """Return a stream of the documents of files, one file after the other.

    split: as in `Stream`. A position is the index of a file and the number of its documents that were read.
    """
    total = max(1, sum(file.size for file in files))

    def batches(position: Any) -> Generator[Batch, None, None]:
        index, done = position or (0, 0)
        read = sum(file.size for file in files[:index])

        def documents() -> Iterator[Document]:
            nonlocal index, done, read
            while index < len(files):
                for document in islice(files[index].documents(), done, None):
                    done += 1
                    yield document
                read += files[index].size
                index, done = index + 1, 0

        return in_batches(documents(), lambda: [index, done], lambda: read / total)

    return Stream(split=split, batches=batches)


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in parts. Raises UserError if it is unreadable or too large."""
    try:
        with open_file(path, MOST_ROWS) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def _listed(
    folder: Path, paths: Iterable[tuple[str, Path]], split: Split | None, held_out: AbstractSet[str] = frozenset()
) -> tuple[Listing, list[tuple[str, str]]]:
    """List every UTF-8 text, then every file of rows, without exact copies; and what is left out, with the reason.

    held_out: files that validate, in place of those that a hash chooses. An empty file is listed, and counts as left
        out.
    """
    texts: dict[str, tuple[str, Path]] = {}  # digest of the contents -> relative path, path
    tables: dict[str, tuple[str, Path]] = {}  # the same for files of rows
    any_text, left_out = False, list[tuple[str, str]]()
    for relative, path in paths:
        is_table = kind_of(path) in ROW_READERS
        if is_table:
            key, size = digest(path), path.stat().st_size
        else:
            raw = _read(path)
            key, size = hashlib.sha256(raw).hexdigest(), len(raw)
            try:
                any_text |= bool(raw.decode("utf-8"))
            except UnicodeDecodeError:
                left_out.append(("not in UTF-8", relative))
                continue
        known = tables if is_table else texts
        if key in known or not size:
            left_out.append(("equal to another" if size else "empty", relative))
        known.setdefault(key, (relative, path))
    others = [relative for reason, relative in left_out if reason == "not in UTF-8"]
    first, rest = (others or [""])[0], len(others) - 1
    bad = f"{first} is not UTF-8" if not rest else f"{first} and {rest} other files are not UTF-8"
    if not tables and not any_text:
        suffixes, found = ", ".join(FILE_SUFFIXES), bad if others else "there is none"
        raise UserError(f"{folder} must hold text in {suffixes} files (UTF-8), but {found}.")
    if others:
        warnings.warn(f"{folder}: {bad}, and left out; convert what should be read.", stacklevel=1)
    unique = [(relative, path, digest) for kind in (texts, tables) for digest, (relative, path) in kind.items()]
    split = split or ("train" if held_out else None)
    splits: dict[str, Split | None] = {name: "validation" if name in held_out else split for name, *_ in unique}
    files = [File(path.stat().st_size, partial(_documents, path, name, splits[name])) for name, path, _ in unique]
    content = [[relative, key, *["validation"] * (relative in held_out)] for relative, _, key in unique]
    return Listing(files, content), left_out


def stdlib_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without _sysconfigdata* and folders named in STDLIB_EXCLUDED."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        yield from (
            Path(parent, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _documents(path: Path, relative: str, split: Split | None) -> Iterator[Document]:
    if kind_of(path) in ROW_READERS:
        rows = enumerate(ROW_READERS[kind_of(path)](path), 1)
        yield from (Document(split or by_hash(text), text, f"{relative}:{row}") for row, text in rows)
    else:
        yield Document(split or by_hash(relative), _decoded(path), relative)


def _cut_file(path: Path, relative: str) -> File:
    """Return a text whose end validates: VALIDATION_SHARE of its lines, or of its characters if it has few lines."""

    def documents() -> Iterator[Document]:
        text = _decoded(path)
        lines = text.splitlines(keepends=True)
        cut = len(text) - round(VALIDATION_SHARE * len(text))
        cut = text.find(" ", cut) + 1 or cut
        if held_out := round(VALIDATION_SHARE * len(lines)):
            cut = len("".join(lines[:-held_out]))
        yield Document("train", text[:cut], relative)
        yield Document("validation", text[cut:], relative)

    return File(path.stat().st_size, documents)


def _read(path: Path) -> bytes:
    with opened(path, MOST_TEXT) as file:
        return file.read()


def _decoded(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds other bytes.") from None


def files_below(folder: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, str]]]:
    """Return the regular files below a folder, as (relative path, path), and all else, as (reason, relative path).

    Folders behind links come last, and each folder only once: circles of links end, and other files keep their order.
    A file whose name is not UTF-8, which no file of a run could name, counts as all else.
    """
    found: list[tuple[str, Path]] = []
    unlisted: list[tuple[str, str]] = []
    starts, seen = [folder], set()

    def relative(path: Path | str) -> str:
        return Path(path).relative_to(folder).as_posix()

    def printable(name: str) -> str:
        return os.fsencode(name).decode("utf-8", "backslashreplace")

    for start in starts:
        links: list[Path] = []
        here: list[tuple[str, Path]] = []
        for parent, folders, names in os.walk(
            start,
            onerror=lambda error: unlisted.append(
                ("in a folder that cannot be read", printable(relative(error.filename)))
            ),
        ):
            if (place := (os.stat(parent).st_dev, os.stat(parent).st_ino)) in seen:
                folders.clear()
                continue
            seen.add(place)
            links += [path for path in (Path(parent, name) for name in folders) if path.is_symlink()]
            here += [(relative(path), path) for path in (Path(parent, name) for name in names)]
        found += sorted(here)
        starts += sorted(links)
    unlisted += [("with a name that is not UTF-8", printable(name)) for name, _ in found if printable(name) != name]
    found = [(name, path) for name, path in found if printable(name) == name]
    regular = [(name, path) for name, path in found if path.is_file()]
    unlisted += [
        ("linked to nothing" if path.is_symlink() else "not regular", name)
        for name, path in found
        if not path.is_file()
    ]
    return regular, unlisted


def splits_by_name(names: Iterable[str]) -> dict[str, str]:
    """Return the split that each relative path states: train, validation or test. The last part that states one counts.

    Paths that state none are left out. The result is empty if no path states train, or fewer than half state a split,
    as where the words are those of a library's modules.
    """
    stated: dict[str, str] = {}
    paths = list(names)
    for name in paths:
        for part in PurePosixPath(name.lower()).parts:  # the last one counts that states a split
            words = [word for word in re.split("[^a-z]+", part) if word in SPLIT_NAMES]
            stated |= {name: SPLIT_NAMES[words[0]]} if words else {}
    return stated if "train" in stated.values() and 2 * len(stated) >= len(paths) else {}


def is_card(name: str, text: str, others: Mapping[str, bool]) -> bool:
    """Whether a README.md is a data set's card: it has a card's front matter, or only tables beside or below it.

    name: relative path. text: contents. others: whether each other file is a table, by relative path.
    """
    front = re.match(r"---\r?\n(.*?)\n---", text, re.DOTALL)
    if front and CARD_KEYS.search(front[1]):
        return True
    parent = PurePosixPath(name).parent
    beside = [is_table for other, is_table in others.items() if PurePosixPath(other).is_relative_to(parent)]
    return bool(beside) and all(beside)
