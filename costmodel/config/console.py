"""The console of all commands, which escapes the control characters of a text."""

from typing import IO, Any

import rich.console
from rich.text import Text

from costmodel.config.visible import VisibleStream, visible


class Console(rich.console.Console):
    """A console whose only control characters are its own."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(visible(text), **settings)

    @property
    def file(self) -> IO[str]:
        file = super().file  # of the process, unless one was given
        return file.stream if isinstance(file, VisibleStream) else file

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file
