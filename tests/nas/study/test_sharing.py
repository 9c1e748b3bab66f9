import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from costmodel.errors import StoppedError
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import ScaleName
from nas.run.config import StudyConfig, study_recipe
from nas.study import resources, throughput
from nas.study.priced_study import price_study
from nas.study.resolve import _on_devices, memory_lines
from nas.study.resources import Node, best_share, choose_share, choose_threads, resolved, study_resources
from nas.study.throughput import keep_rates, kept_rates, shared_rates, training_rate
from nas.training import memory
from nas.training.device import lowered
from nas.training.memory import training_memory
from search_spaces.bases import BASES
from tests.costmodel.engine.test_session import until
from tests.nas.study.conftest import ONE_TRIAL

NODE = Node(node_id="", name="here", num_cpus=16, num_gpus=1)


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "on_cores", "share"),
    [
        ({1: 100.0, 2: 180.0, 4: 300.0}, 1, None, 0.25),  # small models gain
        ({1: 100.0, 2: 105.0, 4: 109.0}, 1, None, 1.0),  # large ones do not
        ({1: 100.0, 2: 105.0, 4: 130.0}, 1, None, 0.25),
        ({1: 100.0, 2: 180.0, 4: 120.0}, 1, None, 0.5),
        ({1: 100.0, 2: 180.0}, 1, 180.0, 0.0),  # never slower for a GPU's presence
        ({1: 100.0, 2: 180.0}, 2, 180.0, 0.5),
        ({1: 100.0}, 1, 99.0, 1.0),
    ],
)
def test_trials_share_a_gpu_where_that_is_faster_than_fewer_and_than_all_cores(gpu, num_gpus, on_cores, share):
    assert best_share(gpu, num_gpus, on_cores) == share


def study(scale: ScaleName, **settings) -> tuple[StudyConfig, Candidate]:
    config = StudyConfig(budget_latency="5min", scale=scale, **settings)
    return config, Candidate(architecture=BASES["tiny"], recipe=study_recipe(config, None))


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A GPU that trains 1,000 tokens a second with one training, and 300 more with each further one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    monkeypatch.setattr(memory, "counted_layer_function", lambda recipe: nn.Module.__call__)  # asks the card for more
    monkeypatch.setattr(resources, "available_bytes", lambda device: 10**12)
    measured = []

    def rates(candidate, device, counts):
        measured.append((candidate.recipe.precision, device, tuple(counts)))
        return {count: 700.0 + 300.0 * count for count in counts}

    monkeypatch.setattr(resources, "shared_rates", rates)
    monkeypatch.setattr(resources, "training_rate", lambda candidate, device, **settings: 1.0)
    return measured


@pytest.mark.parametrize(
    ("scale", "settings", "core", "share", "line"),
    [
        ("smoke", {}, 1.0, 0.0, "trials train on the CPU: H100 was not measured at this shape; --gpus-per-trial 1"),
        ("proxy", {}, 1e6, 0.0, "trials train on the CPU: H100 was not measured"),  # too short to measure
        ("proxy", {}, 400.0, 0.0, "trials train on the CPU: on H100, 1 at a time train 1,000 tokens/s, 2 at a time"),
        ("proxy", {}, 100.0, 1 / 8, "8 trials train on each GPU: on H100, 1 at a time"),
        ("proxy", {"time_budget": "9min"}, 100.0, 0.0, "trials train on the CPU: H100 was not measured"),
        ("gpu", {}, None, 1 / 8, "8 trials train on each GPU"),
        ("gpu", {"time_budget": "9min"}, None, 1.0, "1 trials train on each GPU: H100 was not measured"),
    ],
)
def test_a_search_measures_where_it_is_worth_the_time_and_says_what_it_decided(
    monkeypatch, caplog, card, scale, settings, core, share, line
):
    caplog.set_level("INFO", "nas")
    monkeypatch.setattr(resources, "training_rate", lambda candidate, device: core)
    config, candidate = study(scale, **settings)
    assert choose_share(config, NODE, candidate) == share
    assert caplog.messages[-1].startswith(line)
    is_measured = "was not measured" not in line
    assert card == [("bfloat16", "cuda", (1, 2, 4, 8))] * is_measured
    assert choose_share(config, NODE, candidate) == share  # measured once for a card and a shape
    assert len(card) == is_measured
    assert ("measured by an earlier search" in caplog.messages[-1]) == is_measured


def test_no_more_trials_share_a_gpu_than_fit(monkeypatch, card):
    config, candidate = study("gpu")
    one = training_memory(lowered(candidate, "cuda", config.recipe), "cuda").total
    monkeypatch.setattr(resources, "available_bytes", lambda device: int(2.5 * one / resources.FREE_SHARE))
    assert choose_share(config, NODE, candidate) == 0.5
    monkeypatch.setattr(resources, "available_bytes", lambda device: 1)
    assert choose_share(config, NODE, candidate) == 1.0
    assert [counts for *_, counts in card] == [(1, 2)]


def test_a_measurement_that_fails_leaves_one_trial_to_a_gpu(monkeypatch, caplog, card):
    def failed(*args):
        raise StoppedError("a training that was measured ended early, or took too long")

    caplog.set_level("INFO", "nas")
    monkeypatch.setattr(resources, "shared_rates", failed)
    config, candidate = study("gpu")
    assert choose_share(config, NODE, candidate) == 1.0
    assert "no measurement: a training that was measured ended early" in caplog.text


@pytest.mark.parametrize(
    ("scale", "settings", "rates", "chosen", "measured"),
    [
        ("gpu", {"num_trials": 8}, {1: 100.0, 2: 190.0, 4: 300.0}, 4, [1, 2, 4]),  # 2 generations of 2 on 16 cores
        ("gpu", {"num_trials": 8}, {1: 100.0, 2: 190.0, 4: 200.0}, 2, [1, 2, 4]),
        ("gpu", {"num_trials": 3}, {1: 100.0, 2: 101.0, 4: 102.0, 5: 103.0}, 1, [1, 2, 4, 5]),
        ("gpu", {"num_trials": 8, "time_budget": "9min"}, {}, 1, []),  # too short to measure
        ("gpu", {"num_trials": 64}, {}, 1, []),  # no core is idle
        ("gpu", {"num_trials": 8, "ray_address": "auto"}, {}, 1, []),
        ("proxy", {"num_trials": 8}, {}, 1, []),
    ],
)
def test_idle_cores_are_shared_out_as_threads_where_that_is_measured_to_be_faster(
    monkeypatch, tmp_path, scale, settings, rates, chosen, measured
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def rate(candidate, device, *, num_threads):
        asked.append(num_threads)
        return rates[num_threads]

    monkeypatch.setattr(resources, "training_rate", rate)
    config, candidate = study(scale, **settings)
    node = replace(NODE, num_gpus=0)
    capacity = study_resources(config, [node])
    for _ in range(2):  # measured once for a processor and a shape
        assert choose_threads(resolved(config, capacity), capacity, node, candidate) == chosen
    assert asked == measured


def test_rates_are_of_processes_that_train_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "WINDOW_S", 0.05)
    code = "from nas.study import throughput; throughput.WINDOW_S = 0.05; throughput.serve()"
    monkeypatch.setattr(throughput, "SERVE", (*throughput.SERVE[:2], code))
    _, candidate = study("smoke", seq_len=16)
    assert training_rate(candidate, "cpu") > 0
    rates = shared_rates(candidate, "cpu", [2])
    assert set(rates) == {2}
    assert min(rates.values()) > 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_rates(candidate, "card", rates)
    assert kept_rates(candidate, "card") == rates
    assert kept_rates(candidate, "another card") is None
    assert kept_rates(study("smoke", seq_len=32)[1], "card") is None
    assert kept_rates(study("smoke", seq_len=16, tokens=64)[1], "card") == rates  # the length is no shape
    monkeypatch.setattr(throughput, "SERVE", (*throughput.SERVE[:1], "-S", "-c", "raise SystemExit('no memory')"))
    with pytest.raises(StoppedError, match="ended early"):
        shared_rates(candidate, "cpu", [1])


def test_a_busy_process_ends_with_its_parent():
    code = "import os, subprocess; "
    code += f"print(subprocess.Popen((*{throughput.BUSY!r}, str(os.getpid())), stdout=subprocess.DEVNULL).pid)"
    pid = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or " Z " in stat.read_text())


@pytest.mark.parametrize(
    ("scale", "asked", "has_units", "share", "precision"),
    [
        ("gpu", 0.5, False, 0.5, "bfloat16"),
        ("gpu", 0.0, False, 0.0, None),
        ("gpu", 0.0, True, 0.0, "bfloat16"),
        ("smoke", None, True, 0.0, None),
    ],
)
def test_where_and_in_which_precision_a_run_began_is_part_of_its_configuration(
    card, monkeypatch, scale, asked, has_units, share, precision
):
    monkeypatch.setattr("nas.training.device.has_bf16_units", lambda: has_units)
    config, _ = study(scale, gpus_per_trial=asked)
    made = _on_devices(config, study_resources(config, [NODE]), [NODE], BASES["tiny"], None)
    assert (made.gpus_per_trial, made.recipe.precision) == (share, precision)
    assert study_recipe(made, None).precision == (precision or "float32")


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, ["CPU", "GPU, bfloat16"]),
        ({"gpus_per_trial": 0.5}, ["CPU", "GPU, bfloat16"]),
        ({"gpus_per_trial": 0.0}, ["CPU"]),
        ({"gpus_per_trial": 0.0, "ray_address": "auto"}, ["CPU"]),
    ],
)
def test_a_dry_run_gives_the_memory_on_a_gpu_only_if_trials_may_use_one(card, settings, devices):
    lines = memory_lines(price_study(replace(ONE_TRIAL, **settings)))
    assert [line.rpartition(" on a ")[2] for line in lines] == devices
