"""Recovered models are trained, folded and judged by the users' commands, each step once, and put into one table."""

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from rich.console import Console

from costmodel.errors import UserError
from experiments.__main__ import settings_of
from experiments.recovery import figure, result_table, run
from nas.conversion.parent import read_parent_architecture
from nas.evaluate.table import Row

PARENT = Path(__file__).parents[2] / "nas/parents/gpt2-small-proxy"
ROWS = [
    Row("text", "runs/mixture/unseen/prose", 4096, 20.0, 21.0, 0.05, 0.04, 0.06, 0.1, 0.9),
    Row("task", "quiz/rc_0shot", 200, 0.5, 0.48, -0.02, -0.05, 0.01, None, 0.9),
    Row("writing", "collapsed continuations", 40, 7, 9, 2, None, None, None, None),
]

TOTAL = {"sent_bytes": 9, "messages": 2, "latency_s": 1.5, "peak_bytes": [8]}
ANSWER = json.dumps(
    {
        "tokens": [{"top1_agrees": True}],
        "agreement": {"largest_logit_error": 0.1},
        "total": {"measured": TOTAL, "predicted": TOTAL},
    }
)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that were run in a folder with a mixture; each writes what the next step needs."""
    monkeypatch.chdir(tmp_path)
    for folder in ("recovery", "unseen/prose", "tasks"):
        (tmp_path / "mixture" / folder).mkdir(parents=True)
    commands: list[list[str]] = []

    def call(command, **settings):
        assert command[:2] == [sys.executable, "-m"]
        commands.append(command[2:])
        output = Path(command[command.index("--output-dir") + 1]) if "--output-dir" in command else Path()
        if command[2] == "nas.train" and "stop" in command:
            output.mkdir()
            (output / "train.yaml").touch()
            return CompletedProcess(command, 1)
        if command[2] == "nas.export":
            shutil.copytree(PARENT, output)
        elif command[2] == "nas.private":
            return CompletedProcess(command, 0, ANSWER)
        elif command[2] == "nas.evaluate":
            with Path(command[-1]).with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([Row._fields, *ROWS])
        return CompletedProcess(command, 0)

    def cheaper(name):
        parent = read_parent_architecture(name)
        layers = tuple(replace(layer, norm1="none", attention="none") for layer in parent.layers)
        return replace(parent, layers=layers) if name.endswith("-private") else parent

    monkeypatch.setattr("experiments.recovery.subprocess.run", call)
    monkeypatch.setattr("experiments.recovery.read_parent_architecture", cheaper)
    return commands


def settings(**models):
    changes = {"parent": str(PARENT), "mixture": "mixture", "train": ["--seq-len", "64"], "evaluate": ["--items", "2"]}
    return settings_of("smollm2-mixture", **changes, models=models)


def test_training_and_export_are_done_once(commands, tmp_path):
    asked = settings(first={"placement": "12xMSMGo", "tokens": 64, "seed": 3})
    run("small", asked, Console(width=200))
    folder = Path("runs/experiments/small")
    train, export, evaluate, *private = commands
    assert train == [
        *f"nas.train 12xMSMGo --parent {PARENT} --scale parent --data mixture/recovery --tokens 64 --seed 3".split(),
        *f"--seq-len 64 --output-dir {folder}/first".split(),
    ]
    assert export == f"nas.export {folder}/first --fold --output-dir {folder}/first-private".split()
    assert evaluate[:4] == ["nas.evaluate", f"{folder}/first-private", "--versus", str(PARENT)]
    assert [command[:2] for command in private] == [
        ["nas.private", model] for model in (str(PARENT), f"{folder}/first-private") for _ in asked.answer_protocols
    ]
    with (folder / "small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["prose", "quiz/rc_0shot", "collapsed continuations"]
    assert {(row["model"], row["training_tokens"]) for row in rows} == {("first", "64")}
    assert all(0 < float(row[share]) < 0.7 for row in rows for share in ("sent_bytes_share", "latency_share"))
    assert (folder / "small.png").exists()
    run("small", asked, Console(width=200))
    assert [command[0] for command in commands[3 + len(private) :]] == ["nas.evaluate"]
    shutil.rmtree(folder / "first-private")
    run("small", asked, Console(width=200))
    again = [command[:2] for command in commands[4 + len(private) :]]
    assert [command[0] for command in again[:3]] == ["nas.train", "nas.export", "nas.evaluate"]
    assert again[3:] == []  # the same model
    with pytest.raises(UserError, match=r"first-private must have been made with the experiment's settings, but was"):
        run("small", settings(first={"placement": "12xMSMGo", "tokens": 65}), Console(width=200))


def test_costs_may_be_of_the_last_logits_alone(commands):
    asked = settings(first={"placement": "12xMSMGo", "tokens": 64})
    sent = {}
    for projection in ("all", "last"):
        run(projection, replace(asked, projection=projection), Console(width=200))
        with Path(f"runs/experiments/{projection}/{projection}.csv").open() as file:
            sent[projection] = float(next(csv.DictReader(file))["sent_bytes_share"])
    assert sent["last"] < sent["all"]  # what both models share weighs less


def test_a_stopped_training_continues(commands):
    with pytest.raises(UserError, match=r"nas\.train must end without an error, but its exit status is 1"):
        run("small", settings(first={"placement": "stop", "tokens": 64}), Console(width=200))
    run("small", settings(first={"placement": "stop", "tokens": 64}), Console(width=200))
    assert commands[1] == ["nas.train", "--resume", "runs/experiments/small/first"]


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"needs SmolLM2-135M-Instruct\.Q4_1\.gguf in this folder; docs/llama\.md"):
        run("smollm2-mixture", settings_of("smollm2-mixture"), Console(width=200))
    with pytest.raises(UserError, match=r"needs mixture/recovery in this folder; `python -m experiments run mixture`"):
        run("small", settings(), Console(width=200))


def test_table_and_figure_have_a_point_for_each_model():
    rows = [
        {"model": model, "sent_bytes_share": share, "latency_share": "0.6"}
        | {k: str(v) for k, v in row._asdict().items()}
        for model, share in (("a", "0.48"), ("b", "0.4"))
        for row in ROWS
    ]
    shown = figure(rows, "a model")
    (perplexity, *_), (accuracy, *_) = shown.panels[0].series, shown.panels[2].series
    assert (perplexity.x, perplexity.y) == ((40.0, 48.0, 100.0), (5.0, 5.0, 0.0))
    assert (accuracy.name, accuracy.y) == ("quiz/rc_0shot", (-2.0, -2.0, 0.0))
    rows += [{**row, "kind": "mean", "name": "tasks"} for row in rows if row["kind"] == "task"]
    (mean,) = figure(rows, "a model").panels[2].series
    assert (mean.name, mean.y) == ("mean of the tasks", (-2.0, -2.0, 0.0))
    console = Console(width=200)
    with console.capture() as printed:
        console.print(result_table(rows))
    text = printed.get()
    assert all(words in text for words in ("+5.0 %", "-2.0 points", "+2", "text: runs/mixture/unseen/prose"))
