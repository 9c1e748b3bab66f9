import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

from costmodel.config import cli
from costmodel.errors import InfeasibleError, StoppedError, UserError


def greet(name: str, num_times: int = 1, style: Literal["loud", "quiet"] = "quiet") -> int | None:
    """Say hello.

    Args:
        name: whom to greet.
        num_times: how often.
    """
    print(name, num_times, style)
    return None if name != "nobody" else 5


def code_of(command, *args):
    with pytest.raises(SystemExit) as exit_info:
        cli.run(command, prog="greet", args=args)
    return exit_info.value.code


@dataclass(frozen=True)
class Inner:
    batch: int | None = None
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Settings:
    arch: str
    seq_len: int = 128
    recipe: Inner = Inner()


def test_flags_are_what_differs_from_the_defaults():
    assert cli.flags_of(Settings("SM")) == ["--arch", "SM"]
    given = Settings("SM", 64, Inner(2, (0.5, 1.0)))
    assert cli.flags_of(given)[2:] == ["--seq-len", "64", "--recipe.batch", "2", "--recipe.shares", "[0.5, 1.0]"]


def raising(error: BaseException):
    def command() -> None:
        """Raise."""
        raise error

    return command


def test_flags_come_from_the_signature_and_override_those_of_a_config_file(capsys, tmp_path):
    assert code_of(greet, "Ada", "--num-times", "2") == 0
    assert code_of(greet, "Ada", "--num_times=2", "--style=loud") == 0
    assert code_of(greet, "a_b-c") == 0  # values keep theirs
    assert code_of(greet, "nobody") == 5  # what the command returns
    assert capsys.readouterr().out == "Ada 2 quiet\nAda 2 loud\na_b-c 1 quiet\nnobody 1 quiet\n"
    path = tmp_path / "run.yaml"
    path.write_text("num_times: 3\nstyle: loud\n")
    assert code_of(greet, "Ada", "--config", str(path)) == 0
    assert code_of(greet, "Ada", f"--config={path}", "--num-times=4") == 0
    assert capsys.readouterr().out == "Ada 3 loud\nAda 4 loud\n"


def test_help_comes_from_the_docstring_and_spells_hyphens(capsys):
    assert code_of({"greet": greet}, "greet", "--help") == 0
    text = capsys.readouterr().out
    assert "Say hello." in text
    assert "--num-times" in text
    assert "how often." in text
    assert "--print_config[=flags]" in text
    assert "(type: one of loud, quiet, default: quiet)" in " ".join(text.split())


def test_an_unknown_command_names_those_there_are(capsys):
    assert code_of({"greet": greet, "part": greet}, "gret", "Ada") == 2
    assert capsys.readouterr().err == "error: the command must be one of 'greet', 'part', but got 'gret'.\n"
    assert code_of({"greet": greet, "part": greet}) == 2
    assert capsys.readouterr().err == "error: a command is required: one of greet, part.\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("`x` must be 1,\n  but got 2."), 2, "error: `x` must be 1, but got 2.\n"),
        (InfeasibleError("nothing fits."), 3, "error: nothing fits.\n"),
        (StoppedError("the engine crashed."), 1, "error: the engine crashed.\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (MemoryError("cannot hold 9 GB"), 1, "error: out of memory: cannot hold 9 GB\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_exit_codes(capsys, error, code, line):
    assert code_of(raising(error)) == code
    assert capsys.readouterr().err == line


@pytest.fixture
def bugs(tmp_path, monkeypatch):
    """The folder that bugs are reported in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "private-inference-nas" / "bugs"


@pytest.mark.parametrize("error", [ValueError("no\nvalue"), TypeError("x"), RuntimeError()])
def test_a_bug_is_one_line_and_its_traceback_a_file(capsys, bugs, error):
    assert code_of(raising(error)) == 1
    (path,) = bugs.iterdir()
    line = capsys.readouterr().err
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    assert line == f"error: unexpected {' '.join(told.split())}; this is a bug: the traceback is in {path}\n"
    text = path.read_text()
    assert "Traceback (most recent call last)" in text
    assert "in command\n    raise error" in text
    assert f"python {platform.python_version()}" in text
    for header in ("time: ", "command: ", "versions: private-inference-nas "):
        assert header in text


def test_debug_shows_the_bug_itself_and_leaves_bad_input_on_one_line(bugs, capsys):
    with pytest.raises(TypeError, match="x"):
        cli.run(raising(TypeError("x")), prog="greet", args=["--debug"])
    assert not bugs.exists()
    assert code_of(raising(UserError("no.")), "--debug") == 2
    assert capsys.readouterr().err == "error: no.\n"


@pytest.mark.parametrize(
    "args", [("--debug", "greet", "Ada"), ("greet", "Ada", "--debug"), ("greet", "--debug", "Ada")]
)
def test_every_command_takes_debug_and_no_configuration_holds_it(capsys, args):
    assert code_of({"greet": greet}, *args) == 0
    assert code_of({"greet": greet}, *args, "--print_config") == 0
    assert "debug" not in capsys.readouterr().out
    assert code_of({"greet": greet}, "greet", "--help") == 0
    assert "--debug" in capsys.readouterr().out


def test_a_value_of_thousands_of_characters_does_not_fill_the_line(capsys):
    assert code_of(greet, "Ada", "--num-times", "x" * 5000) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --num-times must be a whole number, but got ")
    assert len(line) < 1100


NO_SETTING = "FILE must not have the key '{}', which is no setting; leave it out."
UNKNOWN = "the file of --config has the unknown key 'num_tmies'; known keys are name, num_times, style."
AFTER, BEFORE = ("greet", "Ada", "--config", "FILE"), ("--config", "FILE", "greet", "Ada")


@pytest.mark.parametrize(
    ("args", "content", "line"),
    [
        (("greet", "a\0b"), None, "an argument must be text in UTF-8 without null characters, but got 'a\\x00b'."),
        (("greet", "\udcff"), None, "an argument must be text in UTF-8 without null characters, but got '\\udcff'."),
        (("greet", "Ada", "--num-times", "x"), None, "--num-times must be a whole number, but got 'x'."),
        (("greet", "Ada", "--style", "x"), None, "--style must be one of loud, quiet, but got 'x'."),
        (("greet", "Ada", "--colour", "x"), None, "unrecognized arguments: --colour x"),
        (
            ("greet", "Ada", "--num-tmies", "2"),
            None,
            "unrecognized arguments: --num-tmies 2; did you mean --num-times?",
        ),
        (("greet", "Ada", "--num-times", "-5min"), None, "--num-times must be a whole number, but got '-5min'."),
        (("greet", "Ada", "--style", "-x"), None, "--style must be one of loud, quiet, but got '-x'."),
        (("greet", "Ada", "--debug", "-x"), None, "unrecognized arguments: -x"),  # that flag takes no value
        (("greet",), None, "the following arguments are required: name"),
        (("greet", "Ada", "--config"), None, "--config must have a value, as in --config=VALUE."),
        # no file hides behind that
        (("greet", "Ada", "--conf=FILE"), "", "unrecognized arguments: --conf=FILE; did you mean --config?"),
        (("greet", "Ada", "--config=FILE"), "debug: true", NO_SETTING.format("debug")),
        (AFTER, None, "FILE cannot be read: No such file or directory."),
        (AFTER, "config: other.yaml", NO_SETTING.format("config")),
        (AFTER, "__path__: 1", NO_SETTING.format("__path__")),
        (AFTER, "sub: {config: other.yaml}", NO_SETTING.format("config")),
        (AFTER, "style: loud\nstyle: loud", "FILE is not valid YAML: key 'style' appears twice, line 2."),
        (AFTER, "num_times: !!int _", "FILE is not valid YAML: string index out of range."),
        (AFTER, "num_tmies: 2", UNKNOWN),
        (AFTER, "num_times: many", "--num-times must be a whole number, but got 'many'."),
        (AFTER, "num_times: null", "--num-times must not be null; leave it out for 1."),
        (AFTER, "num_times: {a: 1}", "--num-times must be a whole number, but got \"{'a': 1}\"."),
        (AFTER, "style: shrill", "--style must be one of loud, quiet, but got 'shrill'."),
        (BEFORE, "greet: 1", "`greet` of FILE must be a mapping of flags to values, but got 1."),
        (BEFORE, "greet: {num_times: null}", "--num-times must not be null; leave it out for 1."),
    ],
)
def test_refusals_are_one_line(capsys, tmp_path, args, content, line):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    given = [argument.replace("FILE", str(path)) for argument in args]
    for command in [{"greet": greet}, greet][: 1 if args is BEFORE else 2]:
        assert code_of(command, *(given if isinstance(command, dict) else given[1:])) == 2
        assert capsys.readouterr() == ("", f"error: {line.replace('FILE', str(path))}\n")


@pytest.mark.parametrize(("args", "expected"), [([], False), (["--yes"], True), (["--yes=false"], False)])
def test_a_flag_of_type_bool_needs_no_value(args, expected, capsys):
    def command(yes: bool = False) -> None:
        print(yes)

    with pytest.raises(SystemExit):
        cli.run(command, prog="x", args=args)
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(("redirections", "arch", "code"), [(">&-", "SM", 0), ("2>&-", "none such", 2)])
def test_output_that_is_closed_from_the_start_is_no_bug(redirections, arch, code):
    command = f'exec "$0" -m costmodel estimate "{arch}" --format csv {redirections}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_more_ctrl_c_while_a_command_ends_is_ignored():
    code = (
        "import atexit, os, signal, sys\n"
        "from costmodel.config import cli\n"
        "atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)])\n"
        "def action(): raise KeyboardInterrupt\n"
        "sys.exit(cli.guarded(action))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(first):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with cli.deferred_interrupt() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), first)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
