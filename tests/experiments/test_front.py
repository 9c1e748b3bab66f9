"""The experiment of a front searches from a parent's file once, as a user does, and shows what it found."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from costmodel.errors import UserError
from experiments import front
from experiments.__main__ import settings_of
from nas.run.config import StudyConfig
from nas.run.folder import ParentResult
from nas.run.run import Run

SCORES = "\n".join(
    (
        "depth,part,norm,form,inner,kl_nats",
        *(f"{depth},ffn,layernorm,relu,own,{depth / 8}" for depth in range(6) if depth not in (2, 3)),
        *(f"{depth},ffn,layernorm,relu,frozen,{0.5}" for depth in range(6)),
        *(f"{depth},ffn,layernorm,gelu,own,0.0" for depth in range(6)),
    )
)
FILES = {"parent": "a.gguf", "mixture": "mixture"}


@pytest.fixture
def search(make_record, make_meta, tmp_path, monkeypatch):
    """The calls of `nas.search`, each of which leaves a run of one candidate."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def call(command, **settings):
        calls.append(command[2:])
        folder = Path(command[command.index("nas.search") :][-1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").touch()
        (folder / "blocks.csv").write_text(SCORES)
        return SimpleNamespace(returncode=0)

    def load(folder):
        parent = ParentResult(name="a.gguf", notation="SM+LN+G", val_loss=2.0, latency_s=200.0)
        config = StudyConfig(budget_latency="5min", seq_len=32, num_trials=1)
        found = make_record(
            val_loss=2.0 + math.log(1.25), perplexity=1.25 * math.exp(2.0), latency_s=2.0, sent_bytes=3e6
        )
        return Run(folder=folder, config=config, meta=make_meta(parent=parent), records=(found,))

    monkeypatch.setattr("experiments.recovery.subprocess.run", call)
    monkeypatch.setattr(front, "load_run", load)
    return calls


def test_a_front_is_searched_once_and_shown_next_to_the_file(search):
    settings = settings_of("gemma", **FILES, search=["--budget-latency", "5min"])
    Path("a.gguf").touch()
    Path("mixture/recovery").mkdir(parents=True)
    console = Console(width=200)
    for _ in range(2):
        with console.capture() as printed:
            front.run("small", settings, console)
    place = "runs/experiments/small/search"
    given = "nas.search --parent a.gguf --data mixture/recovery --space parent --budget-latency 5min --output-dir"
    assert search == [[*given.split(), place], ["nas.search", "--resume", place]]
    with pytest.raises(UserError, match=f"{place} must have been made with the experiment's settings, but was not"):
        front.run("small", settings_of("gemma", **FILES, search=["--budget-latency", "6min"]), console)
    shown = printed.get()
    parent, found = (next(line for line in shown.splitlines() if line.startswith(name)) for name in ("parent", "a0"))
    assert re.findall(r"\(100%\)|[\d.]+ \([+-].*? %\)", parent)[1:] == ["(100%)", "7.39 (+0.0 %)"]
    assert re.findall(r"[\d.]+ \([+-].*? %\)", found) == ["9.24 (+25.0 %)"]
    scores = [re.split("  +", line.strip()) for line in shown.splitlines() if line.startswith("ffn")]
    assert scores == [
        ["ffn layernorm relu", "0.0000", "0.0625", "0.5625"],
        ["ffn layernorm relu frozen", "0.5000", "0.5000", "0.5000", "0.5000"],
    ]
    assert Path("runs/experiments/small/small.png").exists()


def test_what_is_missing_is_named(search):
    with pytest.raises(UserError, match=r"needs SmolLM2-135M-Instruct\.Q4_1\.gguf in this folder; docs/llama\.md and"):
        front.run("smollm2", settings_of("smollm2"), Console())
    assert search == []
