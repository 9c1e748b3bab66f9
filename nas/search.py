"""`python -m nas.search --budget-latency 5min`: from a latency budget to a perplexity-latency Pareto front.

Prices the whole space first (nothing over budget is ever trained), trains candidates under Ray Tune, and leaves a
run folder with ledger, front, plots and architecture configs. `--resume RUN` continues a stopped run, or extends
a finished one with a larger `--num-trials`.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from costmodel.config import cli
from costmodel.errors import UserError
from costmodel.trust.data_range import said
from nas.recipe.recipe import SCALES
from nas.study.config import StudyConfig, flag
from nas.study.run_folder import find_run, read_config, read_meta, run_pricer, run_space
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import (
    FeasibleSpace,
    check_feasible,
    format_budget,
    format_price,
    num_deployed,
    within_budget,
)
from search_spaces.budget.priceable import Priceable, priceable
from search_spaces.budget.priced_space import cheapest, extrapolated, most_expensive, price_of, price_space
from search_spaces.notation import name_of
from search_spaces.space import num_members

# A resumed run keeps what its results depend on; only these may differ from one process to the next.
RESUMABLE = ("num_trials", "finalist_seeds", "time_budget", "max_concurrent", "ray_address")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for. folder: the run to resume, or None for a new one."""

    config: StudyConfig
    folder: Path | None
    output_dir: Path | None
    dry_run: bool


def parse(args: Sequence[str]) -> Request:
    """The request of a command line. Raises UserError (or the parser's own error) for bad input."""
    parser = cli.Parser(prog="python -m nas.search", description=__doc__)
    parser.add_argument("--config", action="config")
    parser.add_argument("--budget_latency", type=str, help="most seconds per token, with a unit, such as 5min")
    parser.add_class_arguments(StudyConfig, skip={"budget_latency"})
    parser.add_argument("--output_dir", type=str, help="folder of the run (default: runs/<UTC time>)")
    parser.add_argument("--resume", type=str, help="continue this run: its folder, or `latest`")
    parser.add_argument("--dry_run", action="store_true", help="price the space and stop; writes nothing")
    given = cli.given(parser, args)
    output_dir, resume, dry_run = given.pop("output_dir", None), given.pop("resume", None), given.pop("dry_run", False)
    given.pop("config", None)
    if resume is not None:
        if output_dir is not None:
            raise UserError("--output-dir does not go with --resume: a resumed run stays in its folder.")
        folder = find_run(resume)
        return Request(config=_resumed(folder, given), folder=folder, output_dir=None, dry_run=dry_run)
    if "budget_latency" not in given:
        raise UserError("--budget-latency is required, with a unit, such as --budget-latency 5min.")
    config = StudyConfig(**given.as_dict())
    return Request(config=config, folder=None, output_dir=output_dir and Path(output_dir), dry_run=dry_run)


def _resumed(folder: Path, given: Namespace) -> StudyConfig:
    """The run's own configuration with what may change. Raises UserError for a flag that may not."""
    config = read_config(folder)
    for name, value in given.as_dict().items():
        if name not in RESUMABLE and value != getattr(config, name):
            raise UserError(
                f"{flag(name)} of a resumed run must stay {getattr(config, name)!r}, but got {value!r}; "
                f"start a new run, or change only {', '.join(map(flag, RESUMABLE))}."
            )
    if given.get("num_trials", config.num_trials) < config.num_trials:
        raise UserError(
            f"--num-trials of a resumed run can only be raised from {config.num_trials}, but got {given.num_trials}."
        )
    return replace(config, **given.as_dict())


def search(request: Request, console: Console) -> None:
    """Prices the space, then, unless it is a dry run, trains candidates and writes the run folder.

    Raises UserError for bad input (nothing is written), InfeasibleError if nothing fits the budget, StoppedError
    or OSError if the run cannot go on.
    """
    config = request.config
    pricer = run_pricer(request.folder, config)
    found = priceable(run_space(request.folder, config, _tables(request)), pricer, config.workload, config.accounting)
    priced = price_space(found.space, pricer, config.workload, config.accounting)
    feasible = within_budget(priced, config.budget)
    for line in (*_left_out(found), *overview(feasible), *_extrapolated(feasible), *_last_projection(feasible)):
        console.print(line, soft_wrap=True, highlight=False)
    check_feasible(feasible)
    if request.dry_run:
        return
    from nas.study.run_study import run_campaign  # torch, Ray and matplotlib are not needed to price a space

    run_campaign(config, feasible, console, folder=request.folder, output_dir=request.output_dir)


def _tables(request: Request) -> Architecture | None:
    """The parent, whose vocabulary and context are priced at full size; None where those of space and scale are."""
    config = request.config
    if SCALES[config.scale].vocab_size is not None or config.parent in (None, "none"):
        return None
    if request.folder is not None:
        return read_meta(request.folder).base
    from nas.conversion.parent import load_parent  # needs torch

    return load_parent(config.parent).model.architecture


def _left_out(found: Priceable) -> list[str]:
    return [f"left out of the space: {choice}: {reason}" for choice, reason in found.left_out.items()]


def _extrapolated(feasible: FeasibleSpace) -> list[str]:
    """What `published` prices beyond its data: all of its rows have 12 heads in every layer."""
    choices = feasible.space.definition.choices
    if feasible.priced.pricer.protocol != "published" or choices is None or "softmax-half" not in choices.attention:
        return []
    return ["note: layers with half of the heads are priced by extrapolation, since no printed row varies heads"]


def _last_projection(feasible: FeasibleSpace) -> list[str]:
    """What the budget would admit if the last token alone were projected onto the vocabulary."""
    priced, work = feasible.priced, feasible.priced.workload
    if work.deployment.projection == "last":
        return []
    last = replace(work, deployment=replace(work.deployment, projection="last"))
    other = within_budget(price_space(priced.space, priced.pricer, last, priced.accounting), feasible.budget)
    least = format_price(price_of(other.priced, cheapest(other.priced)))
    return [f"with --projection last: {other.num_feasible:,} members within, the cheapest at {least}"]


def overview(feasible: FeasibleSpace) -> list[str]:
    """What is known before anything is trained: size, feasible share, cheapest and most expensive member."""
    priced = feasible.priced
    size, within = num_members(priced.space), feasible.num_feasible
    lines = [
        f"space {priced.space.name}: {size:,} members, {within:,} ({100 * within / size:.3g} %) within "
        f"{format_budget(feasible.budget)} per token at T={priced.seq_len}, protocol {priced.pricer.protocol}"
        + (f" on {priced.pricer.network}" if priced.pricer.network else "")
        + (f", per token of {priced.workload.new_tokens}" if priced.workload.new_tokens > 1 else "")
    ]
    if priced.accounting == "deployed":
        whole, admitted = num_deployed(feasible)
        lines.append(f"deployed architectures: {whole:,}, {admitted:,} of them within; prices are of those")
    for title, member in (("cheapest", cheapest(priced)), ("most expensive", most_expensive(priced))):
        name = name_of(member.architecture, entropy_regularised=member.entropy_regularised)
        outside = said(extrapolated(priced, member))
        lines.append(f"{title}: {name}, {format_price(price_of(priced, member))}{outside and f'; {outside}'}")
    return lines


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    arguments = sys.argv[1:] if args is None else args
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler that ends us is as good as Ctrl-C
    return cli.guarded(lambda: search(parse(arguments), Console()), debug=cli.DEBUG in arguments)


if __name__ == "__main__":
    sys.exit(main())
