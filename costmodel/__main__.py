"""`python -m costmodel estimate|compare|diff|validate|calibrate`: what private inference costs, and how we know."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from costmodel.calibration import microbenchmark
from costmodel.calibration.fit_compute import fit_testbed as fit_compute
from costmodel.calibration.fit_published import calibrate as fit_testbed
from costmodel.calibration.fit_published import dump_testbed
from costmodel.commands.architectures import row_graph
from costmodel.commands.compare import compare
from costmodel.commands.diff import diff
from costmodel.commands.estimate import estimate as estimate
from costmodel.commands.output import console as new_console
from costmodel.commands.validate import validate
from costmodel.config import cli
from costmodel.config.units import format_seconds
from costmodel.engine import spu as mpc_engine
from costmodel.errors import StoppedError, UserError
from costmodel.protocols import published
from costmodel.protocols.compute_testbed import dump_compute
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.published_rows import published_rows


def calibrate(
    protocol: Literal["published", "semi2k", "aby3", "cheetah"] = "published",
    engine: Literal["spu"] | None = None,
    output: Path | None = None,
) -> None:
    """Fit a testbed and write it: on the printed rows, or on what the engine takes on this machine.

    A calibration that was stopped goes on where it was: its timings so far are in a file beside the output.

    Args:
        protocol: the protocol whose testbed is fitted.
        engine: spu to measure a protocol of the engine; none for published.
        output: the file to write; for published, by default the committed one.
    """
    if (protocol == "published") != (engine is None):
        raise UserError(f"--protocol {protocol} must be fitted with{'out' if engine else ''} --engine spu.")
    if engine is None:
        rows = published_rows()
        _write(output or published.TESTBED, dump_testbed(fit_testbed(rows, {row.name: row_graph(row) for row in rows})))
        return
    if output is None:
        raise UserError(f"--output is required for protocol {protocol}: the .yaml file to write.")
    if os.path.isdir(output) or not os.access(output.parent, os.W_OK):  # before it is measured for minutes
        raise UserError(f"--output {output} must be a file in a folder that can be written to.")
    mpc_engine.check_installed()
    timings = output.with_suffix(f".{protocol}.timings.jsonl")
    _write(output, _measured_testbed(protocol, timings))
    timings.unlink()


def _measured_testbed(protocol: str, path: Path) -> str:
    """The text of a testbed; every timing is saved in a file as soon as it is there."""
    setting = EngineSetting()
    known = microbenchmark.saved(path)
    timings = []
    console, total = Console(stderr=True, highlight=False, soft_wrap=True), len(microbenchmark.plan(protocol))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(protocol, total=total, visible=console.is_terminal)
        try:
            for timing in microbenchmark.measure(protocol, setting, known):
                if timing not in known:
                    microbenchmark.save(timing, path)
                timings.append(timing)
                progress.update(task, advance=1, description=f"{protocol}: {timing.kind}")
                if not console.is_terminal:
                    left_s = progress.tasks[task].time_remaining
                    eta = "" if left_s is None else f", about {format_seconds(left_s)} left"
                    console.print(f"{protocol}: {timing.kind}, {len(timings)} of {total} kinds of op{eta}")
        except mpc_engine.EngineError as error:
            raise StoppedError(f"{error} Timings so far are in {path}; run the command again to go on.") from None
    return dump_compute(fit_compute(protocol, setting, timings))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}.") from None
    new_console().print(f"wrote {path}")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    commands: dict[str, cli.Command] = {
        "estimate": estimate,
        "compare": compare,
        "diff": diff,
        "validate": validate,
        "calibrate": calibrate,
    }
    cli.run(commands, prog="python -m costmodel", args=args)


if __name__ == "__main__":
    main()
