"""The measurements of `experiments run gpu`: their parts at a small scale on a CPU, their rows, and bad input."""

import csv
import time
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

from costmodel.calibration.fits import processor
from costmodel.errors import StoppedError, UserError
from experiments import gpu
from experiments.__main__ import run
from experiments.gpu import CSV_FILE, PARTS, SIZES, Settings, _ended, training
from experiments.measured import COLUMNS, Rows, Way, speeds
from experiments.plain_gpt2 import PlainGpt2, plain_step
from nas.training.trainer import TrainingRun

BASE = SIZES["smoke"].base


def rows_of(folder):
    with (folder / CSV_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def place(tmp_path):
    return gpu.Place("cpu", SIZES["smoke"], None, Rows(tmp_path / CSV_FILE, "cpu", Console(quiet=True)))


def test_a_plain_step_learns():
    step = plain_step(BASE, batch=8, seq_len=16, device="cpu", compiled=False)
    assert step() > [step() for _ in range(30)][-1]


def test_the_plain_model_sees_no_later_token():
    model, inputs = PlainGpt2(BASE, BASE.vocab_size), torch.randint(BASE.vocab_size, (1, 8))
    seen = []
    model.norm.register_forward_hook(lambda module, given, stream: seen.append(stream))
    for last in (1, 2):
        inputs[0, -1] = last
        model(inputs, inputs)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


def test_our_step_is_the_trainers(monkeypatch, place):
    stepped = []
    original = TrainingRun.step

    def counted(run):
        stepped.append(1)
        return original(run)

    monkeypatch.setattr(TrainingRun, "step", counted)
    regularised = gpu._way(place, "ours", gpu._gpt2(place, 16, gpu.REGULARISED))
    with regularised.start() as step:
        step()
    assert stepped == [1]
    assert regularised.tokens == 256
    assert regularised.predicted_bytes > 0


def test_a_training_that_diverged_is_no_measurement(monkeypatch, place):
    candidate = gpu._gpt2(place, 16, gpu.OURS)
    monkeypatch.setattr("nas.training.divergence.nonfinite_step", lambda *_: ("bad at {step}, {layer}", "logits"))
    with pytest.raises(StoppedError, match="ended: bad at 1, logits"), training(candidate, "cpu") as step:
        step()


def test_ways_take_turns_on_a_cpu(place):
    turns = []

    def way(name):
        def step():
            turns.append(name)
            time.sleep(0.002)

        @contextmanager
        def start():
            yield step

        return Way(name, 10, start)

    measured = dict(speeds([way("a"), way("b")], "cpu", rounds=2, burst_s=0.0, rows=place.rows))
    assert "".join(turns) == "aabb" + "abab"  # the warm-up, then the rounds
    assert all(len(speed.rates) == 2 and 0 < min(speed.rates) < 5_000 for speed in measured.values())
    assert all(speed.num_recompiled == 0 and speed.peak_bytes is None for speed in measured.values())


def test_a_way_that_fails_is_a_row(place, tmp_path):
    def fail():
        raise RuntimeError("no compiler")

    assert not list(speeds([Way("a", 10, fail)], "cpu", rounds=1, burst_s=0.0, rows=place.rows))
    assert [(row["name"], row["unit"]) for row in rows_of(tmp_path)] == [("a: no compiler", "failed")]


def test_a_failed_part_is_a_row_and_the_others_run(monkeypatch, tmp_path):
    def fail(place):
        raise RuntimeError("no\nkernel")

    monkeypatch.setitem(PARTS, "step", (fail, 0.1))
    monkeypatch.setitem(PARTS, "sharing", (lambda place: place.rows.add("trainings", 2.0, "tokens/s"), 0.1))
    with pytest.raises(StoppedError, match="experiment gpu: step failed"):
        run("gpu", device="cpu", scale="smoke", parts="step,sharing", output_dir=str(tmp_path))
    rows = rows_of(tmp_path)
    assert list(rows[0]) == list(COLUMNS)
    assert {(row["card"], row["torch"]) for row in rows} == {(processor(), torch.__version__)}
    assert [(row["name"], row["value"]) for row in rows if row["unit"] == "failed"] == [("no kernel", "")]
    assert any(row["part"] == "sharing" and row["value"] == "2" for row in rows)


def test_a_part_ends_when_its_time_is_over(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.TOTAL_S, "cpu", 0.0)
    with pytest.raises(StoppedError, match="step failed"):
        run("gpu", device="cpu", scale="smoke", parts="step", output_dir=str(tmp_path))
    assert "the time of part step is over" in rows_of(tmp_path)[0]["name"]


def test_a_search_that_takes_too_long_is_interrupted():
    assert _ended(("sleep", "60"), 0.1) == -2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": ("step", "moon")}, "--parts must be some of step,smollm2,.* but got 'moon'"),
        ({"parent": "missing.gguf"}, "--parent must be builtin, a file or a folder, but 'missing.gguf' does not exist"),
        ({"parts": ("smollm2",)}, "part smollm2 needs --parent"),
        ({"scale": "gpu"}, "--scale of this experiment must be one of smoke, proxy, paper, but got 'gpu'"),
    ],
)
def test_bad_input_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        Settings(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_needs_a_gpu():
    with pytest.raises(UserError, match="--device cuda needs a GPU that torch can use, but there is none; give"):
        Settings(device="cuda")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler of torch warns of itself
def test_the_whole_script_runs_at_a_small_scale(tmp_path):
    run("gpu", device="cpu", scale="smoke", parent="builtin", output_dir=str(tmp_path))
    rows = rows_of(tmp_path)
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["step", "smollm2", "sharing", "search"]
    assert not [row for row in rows if row["unit"] == "failed"]
    assert all(row["value"] == "0" for row in rows if row["unit"] == "graphs")
