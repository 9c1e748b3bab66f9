"""Files of a corpus."""

from pathlib import Path


def write_files(folder: Path, count: int = 60) -> Path:
    """So many different files of 40 lines, no five lines of which are in two."""
    folder.mkdir()
    for index in range(count):
        lines = (f"def function_{index}_{line}(x):\n    return x + {index * line}\n" for line in range(20))
        (folder / f"module_{index}.py").write_text("".join(lines))
    return folder
