import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from costmodel.calibration import microbenchmark
from costmodel.calibration.microbenchmark import Timing
from costmodel.config.files import load_file, load_mapping
from costmodel.protocols.derived import ComputeTestbed
from search_spaces.bases import base_architecture
from search_spaces.deployed import deployed_id
from search_spaces.notation import parse
from tests.conftest import refusals
from tests.costmodel.conftest import refused


def estimated(run, *args):
    code, out, _ = run("estimate", *args, "--format", "json")
    assert code == 0
    return json.loads(out)


# what is told, and where: what is written and deployed, settings, whom a price trusts, money, keys, what is beyond data
TEXTS = load_mapping(Path(__file__).with_name("told.yaml"))


@pytest.mark.parametrize("name", TEXTS)
def test_output_is_that_of_the_snapshot(run, snapshot, tmp_path, name):
    link = "{name: '[b]a[/b]:warning:', bandwidth_bits_per_s: 1000000000.0, rtt_s: 0.001, source: a test}"
    (tmp_path / "link.yaml").write_text(link)  # brackets are printed as they are
    code, out, err = run(*shlex.split(TEXTS[name]))
    assert (code, err) == (0, "")
    snapshot(name, out)


@pytest.mark.parametrize(
    "flags", ["--protocol=published", "--protocol=aby3 --weights=server --phase=decode --seq-len=9"]
)
def test_what_an_architecture_deploys_to_is_priced_as_asked(run, flags):
    written, itself = (estimated(run, name, *flags.split()) for name in ("EReg(SM+ScFuFFN)", "SM_i12"))
    left = written["deployed"]
    assert (left["notation"], left["placement"]) == ("SM_i12", "12xoSooo")  # linear FFNs vanish, norm-free
    assert left["deployed_id"] == deployed_id(parse("SM_i12", base_architecture("gpt2-small")).architecture)
    assert itself["deployed"]["deployed_id"] == left["deployed_id"]
    assert itself["deployed"]["total"] == left["total"]
    assert left["total"]["latency_s"] < written["total"]["latency_s"]


def test_what_is_said_of_an_op_wraps_and_numbers_do_not(run, monkeypatch):
    monkeypatch.setattr("costmodel.report.tables.PIPE_WIDTH", 80)
    code, out, _ = run("estimate", "SM+LN+G", "--protocol", "semi2k", "--vocab", "3000000", "--network", "wan")
    assert code == 0
    assert re.search(r"^\s*VocabProjection .*\d h +\d+\.\d% +[\d.]+ TB$", out, re.MULTILINE)
    assert all(name in out for name in (" latency ", " communication", "beyond"))


def test_flags_state_a_link_and_override_the_base(run):
    flags = ("SM+LN+R", "--base=tiny", "--protocol=semi2k", "--seq-len=8")
    given = estimated(run, *flags, "--bandwidth", "1Gbps", "--rtt", "0.5ms")
    assert given["network"] == "1Gbps 0.5ms"
    assert given["total"] == estimated(run, *flags, "--network", "lan")["total"]

    def latency(*flags):
        return json.loads(run("estimate", "SM+LN+G", "--format=json", *flags)[1])["total"]["latency_s"]

    whole = latency()
    for less in ("--layers=6", "--d-model=384 --heads=6", "--d-ff=768", "--vocab=1000", "--seq-len=64"):
        assert latency(*less.split()) < whole
    assert latency("--base", "gpt2-18l") == latency("--layers", "18") > whole


def test_an_architecture_from_a_factory(run, tmp_path, monkeypatch):
    (tmp_path / "some_factories.py").write_text(
        "from search_spaces.bases import base_architecture\n"
        "def tiny():\n    print('made')\n    return base_architecture('tiny')\n"
        "def number():\n    return 3\n"
        "def broken():\n    raise RuntimeError('two\\nlines')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = run("estimate", "some_factories:tiny", "--seq-len", "8", "--format", "json")
    assert (code, err, json.loads(out)["architecture"]) == (0, "made\n", "SM+LN+G")
    for name, problem in (
        ("some_factories:broken", "it raised RuntimeError: two lines"),
        ("some_factories:absent", "it raised AttributeError"),
        ("no_such_module_anywhere:x", "it raised ModuleNotFoundError"),
    ):
        message = refused(run("estimate", name))
        assert "must be module:factory, a callable without arguments that returns an Architecture or a torch" in message
        assert problem in message
    assert "must be an Architecture or a torch.nn.Module, but is int" in refused(
        run("estimate", "some_factories:number")
    )


@pytest.mark.parametrize(("args", "message"), refusals("refused.txt", __file__))
def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, args, message):
    (tmp_path / "bad.yaml").write_text("colour: red\n")
    code = 3 if "GB of keys a party" in message else 2
    assert message in refused(run(*shlex.split(args)), code)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_config_files_and_print_config(run, tmp_path):
    _, out, _ = run("estimate", "SM+LN+R", "--seq-len", "64", "--print_config")
    assert yaml.safe_load(out)["seq_len"] == 64
    (tmp_path / "run.yaml").write_text(out)
    direct = run("estimate", "SM+LN+R", "--seq-len", "64")
    assert run("estimate", "--config", "run.yaml") == direct
    assert direct[0] == 0


@pytest.mark.needs_engine
def test_a_testbed_of_one_model_prices_it_as_written_and_as_deployed(run, tmp_path, monkeypatch):
    asked = []

    def measured(plan, protocol, setting, known):
        for series in plan:
            asked.append((series.name, protocol, setting.threads))
            yield Timing(kind=series.name, start_s=9.0, seconds=(1.0,) * sum(series.repeats))

    monkeypatch.setattr(microbenchmark, "measure", measured)
    model = ("EReg(SM+ScFuFFN)", "--base", "tiny", "--layers", "2", "--seq-len", "8", "--threads", "3")
    code, out, err = run("calibrate", "--for", *model, "--protocol", "aby3", "--engine", "spu", "--output", "mine.yaml")
    assert (code, out.splitlines()[0]) == (0, "wrote mine.yaml")
    assert len(asked) == len(set(asked))
    assert f"{len(asked)} of {len(asked)} series" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]  # the timings are no longer needed
    priced = estimated(run, *model, "--protocol", "aby3", "--testbed", "mine.yaml")
    assert priced["total"]["compute_s"] == len(priced["by_op"]) + 9.0 - 3.0  # the warm-up's three ops are not starting
    assert {entry["extrapolation"] for entry in priced["by_op"]} == {1.0}
    assert priced["deployed"]["total"]["compute_s"] < priced["total"]["compute_s"]
    assert "no seconds for" in refused(
        run("estimate", "SM+LN+G", *model[1:], "--protocol", "aby3", "--testbed", "mine.yaml")
    )


@pytest.mark.parametrize(
    ("protocol", "engine"),
    [
        pytest.param("aby3", "spu", marks=pytest.mark.needs_engine),
        pytest.param("crypten", "crypten", marks=pytest.mark.needs_crypten),
    ],
)
def test_kinds_are_measured_twice_and_the_faster_runs_count(run, tmp_path, monkeypatch, protocol, engine):
    num_passes = 0

    def measured(plan, protocol, setting, known):
        nonlocal num_passes
        num_passes += 1
        for series in plan:
            seconds = 3.0 if (num_passes == 1) == (series.kind == "Relu") else 1.0
            yield Timing(kind=series.name, start_s=9.0, seconds=(seconds,) * sum(series.repeats))

    monkeypatch.setattr(microbenchmark, "measure", measured)
    assert run("calibrate", "--protocol", protocol, "--engine", engine, "--output", "mine.yaml")[0] == 0
    assert num_passes == 2
    assert estimated(run, "SM+LN+R", "--protocol", protocol, "--testbed", "mine.yaml")["total"]["compute_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert {kind.fixed_s for kind in load_file(ComputeTestbed, tmp_path / "mine.yaml").kinds.values()} == {1.0}


def test_as_a_process():
    command = [sys.executable, "-m", "costmodel", "estimate", "SM", "--seq-len", "9999"]
    result = subprocess.run(command, capture_output=True, text=True)
    said = "error: `seq_len` must be between 1 and the context 1024, but got 9999.\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", said)
