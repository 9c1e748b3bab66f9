"""How to do it again: the commands that make a run and go on from it."""

import shlex
from pathlib import Path
from typing import NamedTuple

from costmodel.config.cli import flags_of
from nas.run.run import Run


class Command(NamedTuple):
    """A line for a shell, and what it does."""

    line: str
    does: str


def commands_of(run: Run) -> list[Command]:
    """Search again, look, export the pick, price it, go on."""
    folder = shlex.quote(_short(run.folder))
    found = [
        Command(shlex.join(["python", "-m", "nas.search", *flags_of(run.config)]), "the same search, from the start"),
        Command(f"python -m nas.status {folder}", "where this run stands, and why trials did not complete"),
        Command(f"python -m nas.report {folder}", "this page"),
    ]
    if run.front:
        found += _of_the_pick(run, folder, shlex.quote(run.front[-1].arch_id))
    return found


def _of_the_pick(run: Run, folder: str, pick: str) -> list[Command]:
    priced = f"python -m costmodel estimate {folder}/architectures/{pick}.yaml {_priced_under(run, folder)}"
    return [
        Command(f"python -m nas.export {folder} --pick {pick} --fold", "the pick, folded, with its weights"),
        Command(priced, "its costs as written, op by op, and what it deploys to"),
    ]


def _priced_under(run: Run, folder: str) -> str:
    """Flags of what the run's prices are of; its own network and testbed are the copies that it keeps."""
    work = run.workload
    flags = {
        "protocol": run.pricer.protocol,
        "network": run.pricer.network and shlex.quote(run.pricer.network),
        **{kept: f"{folder}/{kept}.yaml" for kept in ("network", "testbed") if (run.folder / f"{kept}.yaml").exists()},
        "seq-len": run.seq_len,
        "projection": None if work.deployment.projection == "all" else work.deployment.projection,
        "embedding": None if work.deployment.embedding == "one-hot" else work.deployment.embedding,
        "new-tokens": None if work.new_tokens == 1 else work.new_tokens,
        "weights": run.config.weights,
    }
    return " ".join(f"--{name} {value}" for name, value in flags.items() if value)


def _short(folder: Path) -> str:
    """From where the command was given, if the run is below; else the run's own name."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
