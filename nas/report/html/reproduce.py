"""How to do it again: the commands that make a run and go on from it."""

import shlex
from pathlib import Path
from typing import NamedTuple

from nas.report.html.run import Run


class Command(NamedTuple):
    """A line for a shell, and what it does."""

    line: str
    does: str


def commands_of(run: Run) -> list[Command]:
    """Search again, look, export the pick, price it, go on."""
    folder = shlex.quote(_short(run.folder))
    found = [
        Command(shlex.join(["python", "-m", "nas.search", *run.flags]), "the same search, from the start"),
        Command(f"python -m nas.status {folder}", "where this run stands, and why trials did not complete"),
        Command(f"python -m nas.report {folder}", "this page"),
    ]
    if run.front:
        best = min(run.front, key=lambda member: member.mean_loss)
        pick, name = shlex.quote(best.arch_id), shlex.quote(best.notation)
        found += [
            Command(f"python -m nas.export {folder} --pick {pick} --fold", "the pick, folded, with its weights"),
            Command(f"python -m costmodel estimate {name}", "what an architecture costs, op by op"),
        ]
    return found


def _short(folder: Path) -> str:
    """From where the command was given, if the run is below; else the run's own name."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
