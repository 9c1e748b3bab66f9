"""Private answers are kept, and stand in a line each."""

import csv
import json
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from rich.console import Console

from costmodel.errors import UserError
from experiments import private_answers as answers
from experiments.__main__ import settings_of
from experiments.private_answers import answer_table, private_answers
from nas.private.model import load_model
from search_spaces.notation import name_of

DOCUMENT = {
    "tokens": [{"top1_agrees": True}, {"top1_agrees": False}, {"top1_agrees": True}],
    "agreement": {"largest_logit_error": 0.0123},
    "total": {
        "measured": {"sent_bytes": 1_000, "messages": 4, "latency_s": 2.0, "peak_bytes": [3_000_000, 2_000_000]},
        "predicted": {"sent_bytes": 1_000, "messages": 4, "latency_s": None},
    },
}


@pytest.fixture
def commands(monkeypatch):
    """The commands that were run, each of which gives an answer."""
    commands = []

    def run(command, **settings):
        commands.append(command[2:])
        return CompletedProcess(command, 0, stdout=json.dumps(DOCUMENT), stderr="")

    monkeypatch.setattr("experiments.private_answers.subprocess.run", run)
    return commands


def test_each_model_answers_once_under_each_protocol(tmp_path, commands):
    models, asked = {"parent": ("p",), "a1": ("runs/r", "--pick", "a1")}, ("--prompt", "x: list[int]")
    console = Console(width=200)
    with console.capture() as printed:
        made = private_answers(models, ("semi2k", "aby3"), asked, tmp_path, console)
    assert printed.get().splitlines()[0] == (
        "python -m nas.private p --protocol semi2k --prompt 'x: list[int]' --format json"
    )
    assert list(made) == [("parent", "semi2k"), ("parent", "aby3"), ("a1", "semi2k"), ("a1", "aby3")]
    assert commands[-1] == [
        "nas.private", "runs/r", "--pick", "a1", "--protocol", "aby3", "--prompt", "x: list[int]", "--format", "json",
    ]  # fmt: skip
    (kept,) = tmp_path.glob("private-a1-aby3-*.json")
    kept.unlink()
    assert private_answers(models, ("semi2k", "aby3"), asked, tmp_path, Console(quiet=True)) == made
    assert len(commands) == 5
    private_answers(models, ("semi2k",), (*asked, "--new-tokens", "2"), tmp_path, Console(quiet=True))
    assert len(commands) == 7


def test_a_model_that_changed_answers_again(tmp_path, commands):
    file, folder, plain = tmp_path / "a.gguf", tmp_path / "member", tmp_path / "plain"
    folder.mkdir()
    plain.mkdir()
    models = {"file": (str(file),), "member": (str(folder),), "plain": (str(plain),)}
    for content, num_commands in (("1", 3), ("1", 3), ("22", 6)):
        file.write_text(content)
        (folder / "checksums.json").write_text(content)
        if num_commands != len(commands):
            (plain / "weights").write_text(content)
        private_answers(models, ("semi2k",), (), tmp_path, Console(quiet=True))
        assert len(commands) == num_commands


def test_one_that_does_not_answer_is_said_in_a_line(tmp_path, monkeypatch):
    failed = CompletedProcess((), 2, stdout="", stderr="Note\nerror: the engine is not installed\n")
    monkeypatch.setattr("experiments.private_answers.subprocess.run", lambda command, **settings: failed)
    with pytest.raises(UserError, match="nas.private parent must answer under aby3, but: error: the engine is not"):
        private_answers({"parent": ("p",)}, ("aby3",), (), tmp_path, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_a_line_has_what_agrees_and_what_it_took():
    console = Console(width=200)
    with console.capture() as printed:
        console.print(answer_table({("parent", "semi2k"): DOCUMENT}))
    line = " ".join(printed.get().splitlines()[-1].split())
    assert line == "parent semi2k 2 of 3 0.012 1,000 equal 4 2 s ? 3.00 MB"


@pytest.mark.usefixtures("commands")
def test_engines_answer_for_both_models_and_leave_their_numbers(tmp_path):
    answers.run("engines", settings_of("engines", output_dir=str(tmp_path)), Console(quiet=True))
    with (tmp_path / "engines.csv").open() as file:
        rows = list(csv.DictReader(file))
    protocols = ("semi2k", "aby3", "crypten")
    assert [(row["model"], row["protocol"]) for row in rows] == list(product(("parent", "member"), protocols))
    assert (rows[0]["as_in_the_clear"], rows[0]["messages"], rows[0]["peak_bytes"]) == ("2", "4", "3000000")
    committed = Path(answers.__file__).parent / "data" / "engines.csv"
    assert committed.read_text().partition("\n")[0] == ",".join(rows[0])
    member = load_model(str(tmp_path / "member"), "knee")
    assert name_of(member.architecture) == "SM+R"  # five layers are left of it
