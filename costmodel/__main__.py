"""`python -m costmodel estimate|compare|diff|validate|calibrate`: predicts, checks and calibrates costs."""

from collections.abc import Sequence
from typing import NoReturn

from costmodel.commands.calibrate import calibrate
from costmodel.commands.compare import compare
from costmodel.commands.diff import diff
from costmodel.commands.estimate import estimate as estimate
from costmodel.commands.validate import validate
from costmodel.config import cli


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `args` name (default: the arguments of the process), and exit with its exit code."""
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
