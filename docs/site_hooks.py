"""Hooks of mkdocs: the pages in the root of the repository are pages of the site, next to those of `docs/`."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md", "SECURITY.md")
UP = re.compile(rf"\]\(\.\./({'|'.join(map(re.escape, PAGES))})")  # a link from docs/ to one of them
DOWN = re.compile(r"\]\(docs/")  # a link from one of them into docs/


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has links between the root and `docs/` point to where both are in the site."""
    return DOWN.sub("](", markdown) if page.file.src_uri in PAGES else UP.sub(r"](\1", markdown)
