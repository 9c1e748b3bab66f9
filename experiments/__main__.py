"""`python -m experiments list | run NAME`: the benchmarks behind the numbers in the documentation."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from costmodel.config import cli
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from experiments import driver, fidelity, link_seconds, pricing, seconds, step_cost, throughput
from experiments.papers import run as papers
from experiments.searchers import benchmark, exact_programs, placements, table
from nas.recipe.recipe import ScaleName
from nas.report.terminal import table_console

CONFIGS = Path(__file__).parent / "configs"
ALL = "all"  # every experiment on the papers
PAPER = "paper"  # their kind

# kind, as an experiment's YAML states it -> (settings of the experiment, console) -> nothing
KINDS: dict[str, Callable[[str, dict[str, Any], Console], None]] = {
    "driver": driver.run,
    "exact-programs": exact_programs.run,
    "fidelity": fidelity.run,
    "link-seconds": link_seconds.run,
    PAPER: papers.run,
    "pricing": pricing.run,
    "search-benchmark": benchmark.run,
    "seconds": seconds.run,
    "table": table.run,
    "table-placements": placements.run,
    "throughput": throughput.run,
    "step-cost": step_cost.run,
}


def definitions() -> dict[str, Path]:
    """Every experiment by name: the YAML files here that state a kind."""
    paths = sorted(CONFIGS.rglob("*.yaml"))
    return {path.stem: path for path in paths if "kind" in load_mapping(path)}


def list_experiments() -> None:
    """Lists the experiments."""
    for name, path in definitions().items():
        print(f"{name}: {path.read_text().splitlines()[0].lstrip('# ')}")


def run(name: str, scale: ScaleName | None = None) -> None:
    """Runs an experiment; a run that was stopped goes on where it was.

    Args:
        name: one of `python -m experiments list`, or `all` for every one on the papers.
        scale: how large, how long and how fast candidates are trained; by default the experiment's own.
    """
    found = {each: load_mapping(path) for each, path in definitions().items()}
    if name not in found and name != ALL:
        raise UserError(
            f"experiment must be one of {', '.join(found)} or {ALL}, but got {name!r}{_nearest(name, found)}"
        )
    kinds = {each: data.pop("kind") for each, data in found.items()}
    settings = {each: data | ({"scale": scale} if scale else {}) for each, data in found.items()}
    console = table_console()
    if name == ALL:
        papers.run_all({each: data for each, data in settings.items() if kinds[each] == PAPER}, console)
    else:
        KINDS[kinds[name]](name, settings[name], console)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run({"list": list_experiments, "run": run}, prog="python -m experiments", args=args)


if __name__ == "__main__":
    main()
