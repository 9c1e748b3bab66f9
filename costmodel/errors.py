"""Exceptions that a command reports in one line, with their exit codes; any other exception is a bug."""


class UserError(ValueError):
    """Bad input: one line with the subject, rule, value and remedy. Nothing was written; exit code 2."""


class UnpricedOpError(UserError):
    """An op, or a form of one, for which a protocol has no formula."""


class InfeasibleError(UserError):
    """No member of a space fits the budget; the line names the cheapest. Exit code 3."""


class StoppedError(RuntimeError):
    """A command started and cannot go on (disk full, no completed trial, engine crash). Exit code 1."""
