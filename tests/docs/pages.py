"""What is in the documentation: its pages, their fenced blocks, commands, links and headings."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("sh", "python", "yaml", "text")

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')  # of a term
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)
_FILE_NAME = re.compile(r"^# (\w+\.py)\n")  # a block of Python that is a file of the reader's


class Block(NamedTuple):
    """A fenced block. language: the word behind its fence."""

    language: str
    text: str


def blocks(text: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, all or those of a language."""
    page_blocks = [Block(*match) for match in _FENCED.findall(text)]
    return [block for block in page_blocks if language in (None, block.language)]


def commands(text: str) -> list[str]:
    """The commands of the blocks of shell, a line each or, behind a backslash, several; without comments."""
    lines = [line for block in blocks(text, "sh") for line in block.text.replace("\\\n", "").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [shlex.join(command) for command in words if command]


def all_commands() -> list[str]:
    """Those of all pages, each once."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page.read_text())))


def files(text: str) -> dict[str, str]:
    """The files that a page has the reader write: blocks of Python that begin with their name, of YAML with a name."""
    contents = {match[1]: block.text for block in blocks(text, "python") if (match := _FILE_NAME.match(block.text))}
    for block in blocks(text, "yaml"):
        name = re.match(r"name: (.+)", block.text)
        assert name, f"a block of YAML begins with its name: {block.text!r:.60}"
        contents[f"{name[1]}.yaml"] = block.text
    return contents


def inline(text: str) -> list[str]:
    """What stands in backticks, outside of fenced blocks; line breaks are spaces."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCED.sub("", text))]


def links(text: str) -> list[str]:
    return _LINK.findall(_FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """Anchors of terms, and of headings as Markdown is shown: lower case, hyphens, no punctuation."""
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | {
        *_ANCHOR.findall(text)
    }


def missing_links(page: Path, text: str) -> list[str]:
    """The links within the repository that lead nowhere."""
    missing = []
    for link in links(text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            missing.append(link)
    return missing
