"""The text of the SmolLM2 experiments, from the files of this Python installation, so that no network is needed.

The training text is Python from the standard library and English from docstrings of installed packages. The second
corpus is English that is not trained on: descriptions of the installed packages, by many authors.
"""

import ast
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path

from nas.corpus.local_files import stdlib_files
from nas.corpus.second import package_files
from nas.storage import replace_file

TEXT, ENGLISH = "text", "english"  # folders of an experiment
DOCUMENTED = ("matplotlib", "networkx", "numpy", "ray", "scipy", "torch", "transformers")  # packages
DOCUMENTED_FILES = 160  # files per package, for about as much English as Python
DOCSTRING, DOCUMENT = 400, range(2_000, 40_000)  # characters: the shortest docstring, and the total of a file
DOCUMENTING = (ast.Module, ast.ClassDef, ast.FunctionDef)
# characters: the shortest, since shorter ones are mostly headings, and the part that is read
DESCRIPTION = 1_500, 4_000


def text(folder: Path) -> Path:
    """Return the folder of the training text: Python of the standard library, and docstrings of packages."""
    if not folder.exists():
        new = folder.with_suffix(".new")
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        copies = {new / "stdlib" / path.relative_to(stdlib): path.read_bytes() for path in stdlib_files(stdlib)}
        for package in DOCUMENTED:
            for name, document in islice(_documents(package), DOCUMENTED_FILES):
                copies[new / "documented" / f"{name}.txt"] = document.encode()
        for path, content in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        new.rename(folder)
    return folder


def _documents(package: str) -> Iterator[tuple[str, str]]:
    for name, path in package_files(package):
        with suppress(SyntaxError, UnicodeError):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            said = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTING))
            document = "\n\n".join(docstring for docstring in said if docstring and len(docstring) >= DOCSTRING)
            if len(document) in DOCUMENT:
                yield name, document


def english(folder: Path) -> Path:
    """Return a folder with the beginning of the description of each installed package."""
    folder.mkdir(exist_ok=True)
    least, most = DESCRIPTION
    for package in distributions():
        description = (package.read_text("METADATA") or "").partition("\n\n")[2]  # it follows the fields
        if len(description) >= least:
            replace_file(folder / f"{package.name}.txt", description[:most])
    return folder
