"""Turns functions into commands that report an error in one line on stderr and exit with a code for its kind.

Exit codes: 0 success; 1 the command started and failed, or has a bug; 2 usage or bad input, found before anything is
written where that is possible; 3 nothing fits the budget; 130 interrupted. Flags and their help come from a function's
signature and docstring. Every command also takes `--config FILE`, `--print_config`, and `--debug`, which shows a bug's
traceback on the terminal.
"""

import atexit
import difflib
import os
import re
import signal
import sys
import warnings
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias, cast

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, auto_cli

from costmodel.config.bugs import BugError, report_bug
from costmodel.config.console import VisibleStream
from costmodel.config.files import load_mapping
from costmodel.errors import InfeasibleError, StoppedError, UserError

Command: TypeAlias = Callable[..., int | None]

DEBUG = "--debug"

MAX_LINE = 1000  # characters of an error, since a very long value must not hide the rest of it

# keys that the parser accepts in a file without setting a flag
_RESERVED = {"config", "debug", "subcommand", "print_shtab", "init_args", "__path__"}
_NO_KEYS = ("help", SUPPRESS, "config", "print_config", "print_shtab")  # flags that a file cannot set

_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "Path": "a path"}


def _must_be(match: re.Match[str]) -> str:
    """Say in words which type a value must have or which of the listed values it must be, and what was given."""
    values = match[1].replace("'", "").split(", ")
    types = [_TYPES.get(value, value) for value in values]
    rule = f"one of {', '.join(values)}" if types == values and len(values) > 1 else " or ".join(types)
    return f"must be {rule}, but got {match[2]!r}."


_PLAIN: dict[str, Any] = {  # message of the parser -> the user's terms
    r"Does not validate .*Subtypes: \[(.*?)\]\s+Errors:.*Given value: (.*)": r"Expected one of \1. Got value: \2",
    r"a typing\.Literal(\[.*?\])\. Got": r"one of \1. Got",
    r"typing\.Literal\[(.*?)\]": r"\1",
    r"<class '(?:[a-z]+\.)?(\w+)'>": r"\1",
    r"\bNoneType\b": "null",
    r'^Parser key "([\w.]+)":\s+Expected(?: a\b)?': r"--\1 must be",
    r"must be (?:one of )?\[?([^\[\]]*?)\]?\. Got value: (.*)": _must_be,
    r"^argument (--[^\s/]+)\S*: expected one argument$": r"\1 must have a value, as in \1=VALUE.",
    r"^argument subcommand: invalid choice: ('.*') \(choose from (.*)\)": r"the command must be one of \2, but got \1.",
    r'^expected "subcommand" to be one of \{(.*)\}, but it was not provided\.': lambda match: (
        f"a command is required: one of {match[1].replace(',', ', ')}."
    ),
    r"(?<=are required: ).*": lambda match: re.sub(r"\w+\.", "", match[0]),  # the command before each argument
}

STOPPED, USAGE, INFEASIBLE, INTERRUPTED = 1, 2, 3, 130


class _Help(DefaultHelpFormatter):
    """Names types in the user's terms."""

    def _get_type_str(self, action: Action) -> str | None:
        text = re.sub(r"^Optional\[(.*)\]$", r"\1 | null", super()._get_type_str(action) or "")
        return re.sub(r"Literal\[(.*?)\]", lambda match: "one of " + match[1].replace("'", ""), text) or None


class _Debug(Action):
    """The flag --debug, which is not part of the configuration; `run` passes it to `guarded`."""

    def __call__(self, *args: Any, **rest: Any) -> None:
        """Do nothing."""


class Parser(ArgumentParser):
    """A parser of flags with hyphens, which reads only strict YAML from files, and raises errors instead of exiting.

    Flags must be written in full, because an abbreviation may mean another flag in a later version.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **settings})
        no_setting = {"dest": SUPPRESS, "default": SUPPRESS, "nargs": 0}
        help = "show the traceback of a bug, instead of writing it to a file"
        self.add_argument(DEBUG, action=_Debug, help=help, **no_setting)

    def add_argument(self, *args: Any, **settings: Any) -> Any:
        """Add an argument; a flag of type bool needs no value."""
        bare: dict[str, Any] = {"nargs": "?", "const": True} if settings.get("type") is bool else {}
        return super().add_argument(*args, **settings, **bare)

    def parse_args(  # type: ignore[override]  # the overloads differ in ways that we do not use
        self, args: Sequence[str] | None = None, *rest: Any, **settings: Any
    ) -> Any:
        """Parse command-line arguments (default: those of the process) and return their values by name.

        A UserError is raised for text that is not UTF-8 or has null characters, for null in a flag with a default, or
        for a `--config` file that cannot be read, is not strict YAML, has a reserved key, or names a subcommand without
        a mapping; an ArgumentError for other faults. The process exits on --help and --print_config.
        """
        arguments = _with_underscores(sys.argv[1:] if args is None else args)
        for argument in arguments:
            if "\0" in argument or argument != argument.encode(errors="ignore").decode():
                raise UserError(f"an argument must be text in UTF-8 without null characters, but got {argument!r:.80}.")
        flags = _flags(self, arguments)
        arguments = _with_lists(_with_values(arguments, flags), flags)
        for argument, following in pairwise([*arguments, ""]):
            flag, equals, value = argument.partition("=")
            if flag == "--config" and (name := value if equals else following):
                _check_config(Path(name), self)
        try:
            parsed = super().parse_args(arguments, *rest, **settings)
        except ArgumentError as error:
            raise ArgumentError(None, error.message + _nearest(error.message, flags)) from error
        _check_nulls(self, parsed)
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.match(r"(?:Subcommand '\w+' does not accept option|Option) '([\w.]+)'", message)
        if unknown:
            actions = (getattr(ex, "subcommand_parser", None) or self)._actions
            known = ", ".join(action.dest for action in actions if action.dest not in _NO_KEYS)
            message = f"the file of --config has the unknown key {unknown[1]!r}; known keys are {known}."
        for pattern, plain in _PLAIN.items():
            message = re.sub(pattern, plain, message, flags=re.DOTALL)
        raise ArgumentError(None, _hyphened(message)) from ex

    def format_help(self, *args: Any) -> str:
        return _hyphened(str(super().format_help(*args)).replace(" \b[", "["))  # a backspace of jsonargparse


def run(commands: Command | dict[str, Command], prog: str, args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `args` (default: the process's) name, then exit with the code that it returns (None is 0).

    commands: a function, or subcommand -> function. prog: the program's name in the help. A command raises UserError
    for bad input (InfeasibleError if nothing is within the budget), and StoppedError, OSError or MemoryError if it
    cannot go on; any other exception is a bug. After an exception, the code is that of its kind.
    """
    arguments, components = list(sys.argv[1:] if args is None else args), cast(Any, commands)
    if isinstance(commands, dict) and arguments and arguments[0] in commands:
        components = {arguments[0]: commands[arguments[0]]}  # the flags of the others take a tenth of a second
    action = partial(auto_cli, components, args=arguments, prog=prog, parser_class=Parser)
    sys.exit(guarded(action, debug=DEBUG in arguments))


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM came; a second one interrupts. Main thread only."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    pressed = False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: pressed
    finally:
        restore()


def guarded(action: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run an action and return its exit code; an exception is reported in one line, and SIGTERM acts like Ctrl-C.

    If the exception is a bug, its traceback is written to a file that the line names, or to stderr if there can be no
    file; with `debug`, the bug is raised. Nothing is reported if the reader of stdout has exited.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before this process began
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    stdout, stderr = (cast(Any, VisibleStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(stdout), redirect_stderr(stderr):
        return _guarded(action, debug)


def _guarded(action: Callable[[], int | None], debug: bool) -> int:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers send it to stop us
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = action()
        sys.stdout.flush()
    except KeyboardInterrupt:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C must not cut off what ends Ray
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader (`| head`) has exited; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED
    except (InfeasibleError, ArgumentError, UserError, StoppedError, OSError) as error:
        is_usage = isinstance(error, ArgumentError | UserError)
        return _say(str(error), INFEASIBLE if isinstance(error, InfeasibleError) else USAGE if is_usage else STOPPED)
    except MemoryError as error:
        return _say(f"out of memory: {str(error) or 'a smaller model, space or sequence takes less'}", STOPPED)
    except Exception as error:
        if debug:
            raise
        return _say(str(error) if isinstance(error, BugError) else report_bug(error), STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code or 0


def _show_warning(message: Warning | str, *where: Any, **rest: Any) -> None:
    print("warning:", " ".join(str(message).split()), file=sys.stderr)


def given(parser: Parser, args: Sequence[str]) -> Namespace:
    """Return the values that arguments and `--config` files set, without defaults; errors are as in `parse_args`."""
    arguments = _with_underscores(args)
    parser.parse_args(arguments)
    stated: Namespace = parser.parse_args(arguments, defaults=False)
    return stated


def flags_of(settings: Any, within: str = "") -> list[str]:
    """Return `--flag`, value, ... for each field of a dataclass whose value is neither None nor the default.

    Fields of nested dataclasses are included. within: prefix of all names, such as `recipe.`.
    """
    flags: list[str] = []
    for field in fields(settings):
        value, name = getattr(settings, field.name), f"{within}{field.name}"
        if is_dataclass(value):
            flags += flags_of(value, f"{name}.")
        elif value is not None and value != field.default:
            flags += ["--" + name.replace("_", "-"), str(list(value) if isinstance(value, tuple) else value)]
    return flags


def _with_underscores(args: Sequence[str]) -> list[str]:
    """Rewrite `--seq-len=8` as `--seq_len=8`, the parameter's name; that of a keyword, like `--for`, ends with `_`."""

    def named(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return f"--{name}{'_' if iskeyword(name) else ''}"

    return [re.sub(r"^--([^=]*)", named, argument) for argument in args]


def _flags(parser: ArgumentParser, args: Sequence[str]) -> dict[str, Action]:
    """Return every flag of a parser, and of the subcommand that the arguments name."""
    flags = dict(parser._option_string_actions)
    for choices in (action.choices for action in parser._actions if isinstance(action.choices, dict)):
        for name in choices.keys() & set(args):
            flags |= _flags(choices[name], args)
    return flags


def _with_values(args: Sequence[str], flags: Mapping[str, Action]) -> list[str]:
    """Attach a value that begins with a hyphen, such as -5min, to its flag, so that it is not taken for a flag."""
    joined: list[str] = []
    for argument in args:
        before = flags.get(joined[-1]) if joined else None
        is_value = argument.startswith("-") and not argument.startswith("--") and argument not in flags
        if is_value and before is not None and before.nargs != 0:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _with_lists(args: Sequence[str], flags: Mapping[str, Action]) -> list[str]:
    """Repeat the flag of a list before each of its values: `--text a b` becomes `--text+=a --text+=b`."""
    single, name = list[str](), ""
    for argument, following in pairwise([*args, "--"]):
        flag, equals, value = argument.partition("=")
        if f"{flag}+" in flags and not value.startswith("["):
            name = flag
            if equals:
                single.append(f"{flag}+={value}")
            elif following.startswith(("--", "[")):  # without a value, or with a list
                single.append(flag)
        elif name and not argument.startswith(("--", "[")):
            single.append(f"{name}+={argument}")
        else:
            single.append(argument)
            name = ""
    return single


def _nearest(message: str, flags: Mapping[str, Action]) -> str:
    """Return a question about the flag that an unknown one resembles; empty if there is none."""
    unknown = re.match(r"unrecognized arguments: .*?(--[a-z][\w.-]*)[^?]*$", message, re.DOTALL)
    names = sorted(map(_hyphened, flags))
    known = [name for name, after in pairwise([*names, ""]) if not after.startswith(f"{name}.")]  # without groups
    near = difflib.get_close_matches(unknown[1] if unknown else "", known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _check_config(path: Path, parser: ArgumentParser) -> None:
    """Raise UserError for a --config file that is not strict YAML or has a key that only the parser may set.

    The value of a subcommand must be a mapping of its flags.
    """
    data = load_mapping(path)
    for keys in (data, *(value for value in data.values() if isinstance(value, dict))):
        if reserved := _RESERVED & keys.keys():
            raise UserError(f"{path} must not have the key {min(reserved)!r}, which is no setting; leave it out.")
    for name in (name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices):
        if not isinstance(value := data.get(name, {}), dict):
            raise UserError(f"`{name}` of {path} must be a mapping of flags to values, but got {value!r:.80}.")


def _check_nulls(parser: ArgumentParser, parsed: Namespace) -> None:
    for action in parser._actions:
        if isinstance(action.choices, dict) and (command := parsed.get(action.dest)):
            _check_nulls(action.choices[command], parsed[command])
        elif action.default not in (None, SUPPRESS) and action.dest in parsed and parsed[action.dest] is None:
            raise UserError(f"--{action.dest.replace('_', '-')} must not be null; leave it out for {action.default}.")


def _hyphened(text: str) -> str:
    return re.sub(r"--(?!print_config)[a-z][a-z0-9_.]*", lambda match: match[0].rstrip("_").replace("_", "-"), text)


def _say(message: str, code: int) -> int:
    text = " ".join(message.split())
    if len(text) > MAX_LINE:
        text = f"{text[: MAX_LINE // 2]} ... {text[-MAX_LINE // 2 :]}"
    print("error:", text, file=sys.stderr)
    return code
