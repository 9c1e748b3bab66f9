"""The engine's profile in the log of a party: bytes and messages that the party sent, by program."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")
PATIENCE_S = 5.0  # the profile of a program that has run is in the log by then


def entries(log: str) -> list[tuple[int, int]]:
    """Bytes and messages of every program, in the order in which they ran."""
    return [(int(match["sent_bytes"]), int(match["messages"])) for match in _LINK.finditer(log)]


@dataclass(kw_only=True, slots=True)
class Log:
    """The log of this process, as far as it was read."""

    path: Path
    position: int = 0

    def traffic(self, num_programs: int) -> list[tuple[int, int]]:
        """Bytes and messages of each of the last so many programs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.path.open("rb") as file:
                file.seek(self.position)
                content = file.read()
            programs = entries(content.decode(errors="replace"))
            if len(programs) >= num_programs or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(programs) == num_programs, f"the profile of {num_programs} programs has {len(programs)} entries"
        self.position += len(content)
        return programs
