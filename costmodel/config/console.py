"""The console of all commands: control characters in a text are shown as escapes, not sent to the terminal."""

import re
from typing import IO, Any, TextIO

import rich.console
from rich.text import Text

# C0 and C1 without tab and line feed, separators of lines, changes of direction, and half surrogate pairs
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text with its control characters escaped, such as `\\x1b`; line feeds and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class VisibleStream:
    """A text stream that writes to `stream`, with control characters escaped as by `visible`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console(rich.console.Console):
    """A rich console that escapes control characters in texts, but not those that rich writes for styles."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(visible(text), **settings)

    @property
    def file(self) -> IO[str]:
        file = super().file  # of the process, unless one was given
        return file.stream if isinstance(file, VisibleStream) else file

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file
