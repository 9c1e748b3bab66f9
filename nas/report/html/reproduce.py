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
        found += _of_the_pick(run, folder, shlex.quote(run.front[-1].arch_id))
    return found


def _of_the_pick(run: Run, folder: str, pick: str) -> list[Command]:
    network = f" --network {shlex.quote(run.pricer.network)}" if run.pricer.network else ""
    under = f"--protocol {run.pricer.protocol}{network} --seq-len {run.seq_len}"
    return [
        Command(f"python -m nas.export {folder} --pick {pick} --fold", "the pick, folded, with its weights"),
        Command(f"python -m costmodel estimate {folder}/architectures/{pick}.yaml {under}", "its costs, op by op"),
    ]


def _short(folder: Path) -> str:
    """From where the command was given, if the run is below; else the run's own name."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
