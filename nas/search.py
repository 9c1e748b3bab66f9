"""`python -m nas.search --budget-latency 5min`: from a latency budget to a Pareto front of perplexity and latency.

The command first computes the costs of the whole space, so that it searches only among members within the budget. Then
it trains candidates with Ray Tune, and writes a run folder with ledger, front, plots and architectures. `--resume RUN`
continues a run, or extends a finished one with a larger `--num-trials`.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from costmodel.config import cli
from costmodel.config.console import Console
from costmodel.config.files import decode
from costmodel.errors import UnpricedOpError, UserError
from nas.api import Study, load_run
from nas.recipe.overrides import RecipeChanges, add_recipe_flags
from nas.recipe.recipe import SMALL_SCALES
from nas.run.config import StudyConfig
from nas.study.priced_study import price_study
from nas.study.time_budget import process_start_s
from search_spaces.budget.feasible import check_feasible


def parse(args: Sequence[str]) -> dict[str, Any]:
    """Return the options given on a command line, by name. Raises UserError or ArgumentError for bad input."""
    parser = cli.Parser(prog="python -m nas.search", description=__doc__)
    parser.add_argument("--config", action="config")
    parser.add_argument("--budget_latency", type=str, help="most seconds per token: 5min, or 60% of --parent's")
    parser.add_class_arguments(StudyConfig, skip={"budget_latency", "recipe"})
    add_recipe_flags(parser, skip={"head_dim", "vocab_size"})
    parser.add_argument("--output_dir", type=str, help="folder of the run (default: runs/<UTC time>)")
    parser.add_argument("--resume", type=str, help="continue this run: its folder, or `latest`")
    parser.add_argument("--dry_run", action="store_true", help="price the space and stop; writes nothing")
    given: dict[str, Any] = cli.given(parser, args).as_dict()
    given.pop("config", None)
    if "recipe" in given:
        given["recipe"] = decode(RecipeChanges, given["recipe"], "the configuration")
    return given


def search(given: dict[str, Any], console: Console) -> None:
    """Compute the costs of the space; unless it is a dry run, train candidates and write the run folder.

    given: options by name: fields of a new study, or changes to a resumed run; and output_dir, resume and dry_run,
        which are removed from the dict.

    Raises errors as `nas.Study.run` or `nas.Run.resume`; a dry run, which writes nothing, only UserError for bad input
    and InfeasibleError if nothing fits the budget.
    """
    output_dir, resume, dry_run = given.pop("output_dir", None), given.pop("resume", None), given.pop("dry_run", False)
    if resume is not None and output_dir is not None:
        raise UserError("--output-dir does not go with --resume: a resumed run stays in its folder.")
    if resume is None and "budget_latency" not in given:
        raise UserError(
            "--budget-latency is required, such as 5min, or a share of the --parent's: --budget-latency 80%."
        )
    run = None if resume is None else load_run(resume)
    if not dry_run:
        if run is not None:
            run.resume(console=console, began_s=process_start_s(), **given)
        else:
            Study(**given).run(output_dir=output_dir or None, console=console, began_s=process_start_s())
        return
    priced = Study(**given).priced() if run is None else price_study(run.resumed(**given), run)
    lines = priced.lines
    if priced.config.scale not in SMALL_SCALES:  # which need little memory; torch is slow to import
        from nas.study.resolve import memory_lines

        lines = [*lines, *memory_lines(priced)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    check_feasible(priced.feasible)


def _run(arguments: Sequence[str], console: Console) -> None:
    given = parse(arguments)
    is_default = "protocol" not in given and "resume" not in given
    try:
        search(given, console)
    except UnpricedOpError as error:
        if not is_default:
            raise
        command = shlex.join(["python", "-m", "nas.search", *arguments, "--protocol", "semi2k"])
        raise UserError(f"{error} For example: {command}") from None


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if args is None else args
    console = Console(markup=False, emoji=False)
    return cli.guarded(lambda: _run(arguments, console), debug=cli.DEBUG in arguments)


if __name__ == "__main__":
    sys.exit(main())
