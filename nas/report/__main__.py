"""`python -m nas.report RUN`: writes a run as one HTML page, for any browser."""

from functools import partial
from pathlib import Path

from costmodel.config import cli
from nas.report.html.page import write_report
from nas.run.run import Run


def report(run: str, output: Path | None = None) -> None:
    """Write the report of a run and print the path of the file.

    Args:
        run: folder of a run, or `latest`.
        output: file to write; by default report.html in the run's folder.
    """
    print(write_report(Run.find(run), output))


main = partial(cli.run, report, "python -m nas.report")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
