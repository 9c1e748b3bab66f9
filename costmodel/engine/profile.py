"""What the engine's profile, the log of a process that runs it, says of every program: bytes and messages."""

import re

_EXECUTION = re.compile(r"SPU execution (?P<name>.+) completed")
_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")


def entries(log: str) -> dict[str, list[tuple[int, int]]]:
    """By program, bytes and messages as each party reports them, pass after pass; lines of a program are neighbours."""
    found: dict[str, list[tuple[int, int]]] = {}
    name = ""
    for line in log.splitlines():
        if match := _EXECUTION.search(line):
            name = match["name"]
        elif match := _LINK.search(line):
            found.setdefault(name, []).append((int(match["sent_bytes"]), int(match["messages"])))
    return found
