"""`python -m experiments list | run NAME`: the benchmarks behind the numbers in the documentation."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console

from costmodel.config import cli
from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from experiments import (
    across_widths,
    coverage,
    driver,
    fidelity,
    link_seconds,
    pricing,
    protocols,
    seconds,
    smollm2,
    step_cost,
    throughput,
    width,
)
from experiments.papers import run as papers
from experiments.papers.settings import Settings as PaperSettings
from experiments.searchers import benchmark, exact_programs, placements, table
from nas.recipe.recipe import ScaleName
from nas.report.terminal import table_console

CONFIGS = Path(__file__).parent / "configs"
ALL = "all"  # every experiment on the papers
PAPER = "paper"  # their kind


class Kind(NamedTuple):
    """settings: what the YAML of an experiment is decoded to, which `run` takes with the experiment's name."""

    settings: type
    run: Callable[[str, Any, Console], None]


KINDS: dict[str, Kind] = {  # as an experiment's YAML states it
    "across-widths": Kind(across_widths.Settings, across_widths.run),
    "coverage": Kind(coverage.Settings, coverage.run),
    "driver": Kind(driver.Settings, driver.run),
    "exact-programs": Kind(exact_programs.Settings, exact_programs.run),
    "fidelity": Kind(fidelity.Settings, fidelity.run),
    "link-seconds": Kind(link_seconds.Settings, link_seconds.run),
    PAPER: Kind(PaperSettings, papers.run),
    "pricing": Kind(pricing.Settings, pricing.run),
    "protocols": Kind(protocols.Settings, protocols.run),
    "search-benchmark": Kind(benchmark.Settings, benchmark.run),
    "seconds": Kind(seconds.Settings, seconds.run),
    "table": Kind(table.Settings, table.run),
    "table-placements": Kind(placements.Settings, placements.run),
    "throughput": Kind(throughput.Settings, throughput.run),
    "smollm2": Kind(smollm2.Settings, smollm2.run),
    "step-cost": Kind(step_cost.Settings, step_cost.run),
    "width": Kind(width.Settings, width.run),
}


@cache
def definitions() -> dict[str, Path]:
    """Every experiment by name: the YAML files here that state a kind."""
    paths = sorted(CONFIGS.rglob("*.yaml"))
    return {path.stem: path for path in paths if "kind" in load_mapping(path)}


def list_experiments() -> None:
    """Lists the experiments."""
    for name, path in definitions().items():
        print(f"{name}: {path.read_text().splitlines()[0].lstrip('# ')}")


def kind_of(name: str) -> str:
    """The kind of an experiment."""
    return str(load_mapping(definitions()[name])["kind"])


def settings_of(name: str, **changes: Any) -> Any:
    """The settings of an experiment, with other values of some keys. Raises UserError for bad ones."""
    data = load_mapping(definitions()[name]) | changes
    return decode(KINDS[data.pop("kind")].settings, data, f"experiment {name}")


def run(name: str, scale: ScaleName | None = None) -> None:
    """Runs an experiment; a run that was stopped goes on where it was.

    Args:
        name: one of `python -m experiments list`, or `all` for every one on the papers.
        scale: how large, how long and how fast candidates are trained; by default the experiment's own.
    """
    names = list(definitions())
    if name not in names and name != ALL:
        raise UserError(
            f"experiment must be one of {', '.join(names)} or {ALL}, but got {name!r}{_nearest(name, names)}"
        )
    changes = {"scale": scale} if scale else {}
    console = table_console()
    if name == ALL:
        papers.run_all({name: settings_of(name, **changes) for name in names if kind_of(name) == PAPER}, console)
    else:
        KINDS[kind_of(name)].run(name, settings_of(name, **changes), console)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run({"list": list_experiments, "run": run}, prog="python -m experiments", args=args)


if __name__ == "__main__":
    main()
