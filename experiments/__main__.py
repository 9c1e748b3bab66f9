"""`python -m experiments list | run NAME`: the benchmarks behind the numbers in the documentation."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from costmodel.config import cli
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from experiments import fidelity, link_seconds, population, pricing, seconds, step_cost, throughput
from experiments.searchers import benchmark, placements, table
from nas.recipe.recipe import ScaleName

CONFIGS = Path(__file__).parent / "configs"

# kind, as an experiment's YAML states it -> (settings of the experiment, console) -> nothing
PIPE_WIDTH = 160  # columns of a table that no terminal limits

KINDS: dict[str, Callable[[str, dict[str, Any], Console], None]] = {
    "fidelity": fidelity.run,
    "link-seconds": link_seconds.run,
    "population": population.run,
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
    paths = sorted(CONFIGS.glob("*.yaml"))
    return {path.stem: path for path in paths if "kind" in load_mapping(path)}


def list_experiments() -> None:
    """Lists the experiments."""
    for name, path in definitions().items():
        print(f"{name}: {path.read_text().splitlines()[0].lstrip('# ')}")


def run(name: str, scale: ScaleName | None = None) -> None:
    """Runs an experiment; a run that was stopped goes on where it was.

    Args:
        name: one of `python -m experiments list`.
        scale: how large, how long and how fast candidates are trained; by default the experiment's own.
    """
    known = definitions()
    if name not in known:
        raise UserError(f"experiment must be one of {', '.join(known)}, but got {name!r}.")
    settings = load_mapping(known[name])
    kind = settings.pop("kind")
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    KINDS[kind](name, settings | ({"scale": scale} if scale else {}), console)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run({"list": list_experiments, "run": run}, prog="python -m experiments", args=args)


if __name__ == "__main__":
    main()
