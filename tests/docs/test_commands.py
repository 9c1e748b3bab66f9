"""Every command of the documentation: the first of each rule run, made small where it is large, the others parsed."""

import re
import shlex

import pytest

from tests.docs.pages import PAGES, ROOT, all_commands, commands, inline
from tests.docs.program import MODULES, flags_of, module_and_args, parse, run
from tests.docs.rules import RULES, rule_of, small

pytestmark = pytest.mark.timeout(1200)  # the first test that is run makes the workspace: minutes on a busy machine

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\*?")
OTHERS_FLAGS = {"--no-deps"}  # of pip
ENGINE = ("costmodel compare", "nas.private")
COMMANDS = all_commands()
FIRST = {rule: command for command in reversed(COMMANDS) if (rule := rule_of(command))}
# The first command of each rule that says so: those after it differ in flags, which are parsed.
TO_RUN = [command for rule, command in FIRST.items() if rule.how == "run"]


def marked(command: str) -> object:
    """A parameter of a test; where the engine is installed, if the command runs it."""
    return pytest.param(command, marks=[pytest.mark.needs_engine] if any(word in command for word in ENGINE) else [])


def test_every_command_has_a_rule():
    assert [command for command in COMMANDS if rule_of(command) is None] == []


def test_every_rule_has_a_command():
    used = {rule_of(command) for command in COMMANDS}
    assert [rule.begins for rule in RULES if rule not in used] == []


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("command", list(map(marked, TO_RUN)))
def test_command_runs(command, workspace, tmp_path, monkeypatch, capfd):
    rule = rule_of(command)
    assert rule
    monkeypatch.chdir(workspace.folder)
    monkeypatch.syspath_prepend(str(workspace.folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace.folder / "cache"))
    words = small(shlex.split(command), rule.more.replace("NEW", str(tmp_path / "new")).split())
    code = run(*module_and_args(words))
    out, err = capfd.readouterr()
    assert code in (0, None), out + err
    assert out


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in TO_RUN])
def test_command_is_parsed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse(shlex.split(command))


def test_flags_in_prose_are_flags_of_a_command(monkeypatch):
    known = set().union(*map(flags_of, dict.fromkeys(MODULES.values()))) | OTHERS_FLAGS
    named = {flag for page in PAGES for code in inline(page.read_text()) for flag in _FLAG.findall(code)}
    assert sorted(flag for flag in named if not is_known(flag, known)) == []


def is_known(flag: str, known: set[str]) -> bool:
    """`--recipe.distillation.*` is, if one flag begins so."""
    spelled = flag.replace("_", "-")  # as those of a command are
    return any(name.startswith(spelled[:-1]) for name in known) if flag.endswith("*") else spelled.rstrip(".") in known


def test_what_is_wrong_fails():
    assert rule_of("python -m nas.sweep latest") is None
    with pytest.raises(Exception, match="--budget-latencies"):
        parse(["python", "-m", "nas.search", "--budget-latencies", "5min"])
    with pytest.raises(AssertionError, match="no-such"):
        parse(["python", "-m", "experiments", "run", "no-such"])
    assert not is_known("--recipe.rout.*", {"--recipe.distillation.end-share"})
    assert commands("```sh\npython -m nas.search --seed 1  # one\n# no command\n```") == [
        "python -m nas.search --seed 1"
    ]
    assert small(["a", "--tokens", "9", "--fold"], ["--tokens", "1", "--fold", "--data", "d"]) == [
        "a", "--tokens", "1", "--fold", "--data", "d",
    ]  # fmt: skip
