"""Which files of a folder are read as text, and why others are not: links, splits by name, cards, other kinds.

Names follow the convention of the Hugging Face hub: `data/test-00000-of-00001.parquet` is of the test split.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
               "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
               "evaluation": "test"}  # fmt: skip
CARD = "README.md"
CARD_KEYS = re.compile(r"^(dataset_info|configs|task_categories|task_ids|size_categories|pretty_name):", re.MULTILINE)
MOST_REASONS = 10  # in a line


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What was read of a folder.

    read: files by kind, and bytes. left_out: for each reason, the number of files and one name.
    """

    folder: str
    read: dict[str, int]
    num_bytes: int
    left_out: dict[str, tuple[int, str]]

    @property
    def lines(self) -> list[str]:
        """Return a line that says what was read and, if anything was left out, a line that says what and why."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.read.items())
        num_read, num_left = sum(self.read.values()), sum(count for count, _ in self.left_out.values())
        lines = [
            f"text of {self.folder}: {num_read:,} of {num_read + num_left:,} files, {self.num_bytes:,} bytes ({kinds})"
        ]
        if self.left_out:
            ordered = sorted(self.left_out.items(), key=lambda item: -item[1][0])
            parts = [
                f"{count:,} {reason} ({'' if count == 1 else 'such as '}{name})"
                for reason, (count, name) in ordered[:MOST_REASONS]
            ]
            rest = sum(count for _, (count, _) in ordered[MOST_REASONS:])
            lines.append(f"not read: {'; '.join(parts)}" + (f"; {rest:,} more" if rest else ""))
        return lines


def reading(folder: Path, read: Iterable[tuple[str, int]], left_out: Iterable[tuple[str, str]]) -> Reading:
    """Return what was read: (kind, bytes) of each file; and what was not: (reason, relative path) of each."""
    files, others = list(read), list(left_out)
    first = dict(reversed(others))
    counts = Counter(reason for reason, _ in others)
    return Reading(
        folder=str(folder),
        read=dict(sorted(Counter(kind for kind, _ in files).items())),
        num_bytes=sum(size for _, size in files),
        left_out={reason: (count, first[reason]) for reason, count in sorted(counts.items())},
    )


def files_below(folder: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, str]]]:
    """Return all files by relative path, and what cannot be listed, as (reason, relative path).

    Folders behind links come last, each once, so that links in a circle end and files without links keep their order.
    """
    found: list[tuple[str, Path]] = []
    unlisted: list[tuple[str, str]] = []
    starts, seen = [folder], set()

    def relative(path: Path | str) -> str:
        return Path(path).relative_to(folder).as_posix()

    for start in starts:
        links: list[Path] = []
        here: list[tuple[str, Path]] = []
        for parent, folders, names in os.walk(
            start, onerror=lambda error: unlisted.append(("in a folder that cannot be read", relative(error.filename)))
        ):
            if (place := (os.stat(parent).st_dev, os.stat(parent).st_ino)) in seen:
                folders.clear()
                continue
            seen.add(place)
            links += [path for path in (Path(parent, name) for name in folders) if path.is_symlink()]
            here += [(relative(path), path) for path in (Path(parent, name) for name in names)]
        found += sorted(here)
        starts += sorted(links)
    regular = [(name, path) for name, path in found if path.is_file()]
    unlisted += [
        ("linked to nothing" if path.is_symlink() else "not regular", name)
        for name, path in found
        if not path.is_file()
    ]
    return regular, unlisted


def splits_by_name(names: Iterable[str]) -> dict[str, str]:
    """Return the split that each file's name states, or its nearest folder's; empty if none states train."""
    stated = {name: split for name in names if (split := _stated(name)) is not None}
    return stated if "train" in stated.values() else {}


def _stated(name: str) -> str | None:
    for part in reversed(PurePosixPath(name.lower()).parts):
        if splits := [SPLIT_NAMES[word] for word in re.split("[^a-z]+", part) if word in SPLIT_NAMES]:
            return splits[0]
    return None


def is_card(name: str, text: str, others: Mapping[str, bool]) -> bool:
    """Whether a file is the card of a data set: by its front matter, or as the only text beside tables.

    others: the other files that are read, by relative path, with whether each is a table.
    """
    if PurePosixPath(name).name != CARD:
        return False
    front = re.match(r"---\r?\n(.*?)\n---", text, re.DOTALL)
    if front and CARD_KEYS.search(front[1]):
        return True
    parent = PurePosixPath(name).parent
    beside = [is_table for other, is_table in others.items() if PurePosixPath(other).is_relative_to(parent)]
    return bool(beside) and all(beside)
