"""The package's exceptions that a command reports in one line, with their exit codes.

OSError and MemoryError (exit code 1), ArgumentError (2) and Ctrl-C (130) are reported this way too; others are bugs.
"""


class UserError(ValueError):
    """Bad input, described in one line: what is wrong, the rule, the value given and, if not obvious, the remedy.

    Exit code 2. Where possible, it is raised before anything is written.
    """


class UnpricedOpError(UserError):
    """A protocol has no formula for an op, one of its forms or public weights; or a testbed lacks a kind or unit."""


class InfeasibleError(UserError):
    """A model, or every member of a space, exceeds the budget. Exit code 3."""


class StoppedError(RuntimeError):
    """A command started and cannot go on (disk full, no completed trial, engine crash). Exit code 1."""


class OutOfRangeError(UserError):
    """A model does not hold in an engine's fixed point: numbers leave the range, or results are too inaccurate.

    with_fewer_bits: whether fewer fraction bits could help.
    """

    def __init__(self, line: str, *, with_fewer_bits: bool = False) -> None:
        super().__init__(line)
        self.with_fewer_bits = with_fewer_bits
