import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from costmodel.calibration import timed_run
from costmodel.calibration.microbenchmark import Timing
from costmodel.protocols.compute_testbed import load_compute
from search_spaces.bases import base_architecture
from search_spaces.deployed import deployed_id
from search_spaces.notation import parse
from tests.costmodel.conftest import refused


def estimated(run, *args):
    code, out, _ = run("estimate", *args, "--format", "json")
    assert code == 0
    return json.loads(out)


SHORT = "estimate SM --base=tiny --protocol=semi2k --seq-len=8"
DECODED = "estimate SM+LN+R --base=tiny --layers=1 --protocol=aby3 --phase=decode"
# what is told, and where: what is written and deployed, settings, whom a price trusts, money, keys, what is beyond data
TEXTS = {
    "published": "estimate SM+ScFuFFN",
    "published-json": "estimate EReg(SM+ScFuFFN) --layers 1 --format json",
    "published-csv": "estimate SM --layers 1 --format csv",
    "published-decode-json": "estimate SM+LN+G --layers 1 --phase decode --format json",
    "beyond-data": "estimate SM+ScFFN --d-model 12",
    "beyond-vocabulary": "estimate SM --vocab 100000000",
    "within-data": "estimate SM+LN+G --layers 15 --seq-len 200 --vocab 50257",
    "semi2k": f"{SHORT} --network=wan --phase=decode --weights=server",
    "semi2k-json": "estimate SM+LN+G --base tiny --layers 1 --seq-len 8 --protocol semi2k --format json",
    "semi2k-kept": f"{SHORT} --phase=decode --weight-masks=kept",
    "semi2k-rows": f"{SHORT} --projection=last --rows=needed --query-block=3",
    "semi2k-link": f"{SHORT} --network=link.yaml",
    "aby3": "estimate SM+LN+R --base=tiny --protocol=aby3 --egress-price 0.09",
    "aby3-csv": "estimate SM+LN+R --base=tiny --layers=1 --protocol=aby3 --format csv",
    "aby3-decode-json": f"{DECODED} --weights=server --embedding=lookup --softmax=relu --seq-len=9 --format json",
    "aby3-one-token-json": f"{DECODED} --seq-len=1 --format json",
    "sigma": "estimate SM+LN+G --protocol sigma --egress-price 0.09 --budget-keys 30GB",
    "sigma-json": "estimate SM+LN+G --layers 1 --protocol sigma --bandwidth 1Gbps --egress-price 0.09 --format json",
    "diff": "diff SM+LN+G SM+ScFuFFN_i6",
    "diff-json": "diff SM+LN+G SM+ScFuFFN_i6 --format json",
    "diff-csv": "diff SM+LN+G SM+LN+R --format csv",
    "diff-of-protocols": "diff SM+LN+R SM+LN+R --base=tiny --protocol=semi2k --versus=aby3 --bandwidth=1Gbps --rtt=4ms",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_told(run, snapshot, tmp_path, name):
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
    monkeypatch.setattr("costmodel.commands.output.PIPE_WIDTH", 80)
    code, out, _ = run("estimate", "SM+LN+G", "--protocol", "semi2k", "--vocab", "3000000", "--network", "wan")
    assert code == 0
    assert re.search(r"^\s*VocabProjection .*\d h +\d+\.\d% +[\d.]+ TB$", out, re.MULTILINE)
    assert all(name in out for name in (" latency ", " communication", "beyond"))


def test_a_link_on_the_command_line(run):
    flags = ("SM+LN+R", "--base=tiny", "--protocol=semi2k", "--seq-len=8")
    given = estimated(run, *flags, "--bandwidth", "1Gbps", "--rtt", "0.5ms")
    assert given["network"] == "1Gbps 0.5ms"
    assert given["total"] == estimated(run, *flags, "--network", "lan")["total"]


def test_flags_override_the_base(run):
    def latency(*flags):
        return json.loads(run("estimate", "SM+LN+G", "--format=json", *flags)[1])["total"]["latency_s"]

    whole = latency()
    for flags in ("--layers=6", "--d-model=384 --heads=6", "--d-ff=768", "--vocab=1000", "--seq-len=64"):
        assert latency(*flags.split()) < whole
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", 'expected "subcommand" to be one of {estimate,compare,diff,validate,calibrate}'),
        ("estimate LN+SM", "architecture must be a name like SM+LN+G"),
        ("estimate absent.yaml", "'absent.yaml' does not exist"),
        ("estimate bad.yaml", "unknown key 'colour'"),
        (
            "estimate SM+LN+G --protocol sigma --budget-keys 8GB",
            "SM+LN+G takes 20.49 GB of keys a party under sigma, but --budget-keys is 8.00 GB; shorten the prompt or",
        ),
        ("estimate SM --base gpt5", "base must be one of gpt2-small"),
        (
            "estimate SM --protocol x",
            "protocol must be one of published, semi2k, aby3, cheetah, sigma, crypten, but got 'x'",
        ),
        ("estimate SM --network lan", "protocol published has its network fitted in"),
        ("estimate SM --rtt 4ms", "protocol published has its network fitted in, but got network 'lan 4ms'"),
        (
            "estimate SM --protocol aby3 --bandwidth 0Gbps",
            "--bandwidth must be a positive number with a unit (bps, kbps, Mbps, Gbps, Tbps), such as 100Mbps or 1Gbps",
        ),
        ("estimate SM --egress-price=-1", "--egress-price must be at least 0 and finite"),
        ("diff SM", "arguments are required"),
        ("diff SM SM --versus x", "protocol must be one of published, semi2k, aby3, cheetah, sigma, crypten, but got"),
        ("estimate SM --protocol aby3 --network ''", "or a .yaml file, but got ''"),
        ("estimate SM --weights server", "its weights fitted in, but got --weights server; leave it out"),
        ("estimate SM --weight-masks=kept", "published has its weight-masks fitted in, but got --weight-masks"),
        (
            "estimate SM --protocol cheetah --vocab 1000000000000",
            "must be of at most 10000 tiles of up to 256 MiB, but 128 x 1000000000000 times 1000000000000 x 768 takes",
        ),
        ("estimate SM --heads 7", "`num_heads` must divide `d_model`, but got num_heads=7, d_model=768"),
        ("estimate SM --layers two", "--layers must be one of int, null. Got value: two"),
        (
            "validate --protocol x",
            "--protocol must be one of ['published', 'sigma']. Got value: x",
        ),
        ("calibrate --protocol sigma", "--protocol must be one of ['semi2k', 'aby3', 'cheetah']. Got value: sigma"),
        ("calibrate --protocol aby3 --engine spu", "--output is required for protocol aby3"),
        (
            "calibrate --protocol aby3 --engine spu --output absent/x.yaml",
            "--output absent/x.yaml must be a file in a folder that can be written to",
        ),
        ("calibrate --layers 3", "flags of a model need --for ARCH, the model to measure; give it or leave"),
        (
            "calibrate --memory --engine spu --protocol aby3 --threads 2 --output m.yaml",
            "--memory is measured of models of its own, on one thread; leave all other flags out",
        ),
        (
            "calibrate --protocol aby3 --engine spu --output x.yaml --threads 0",
            "`threads` must be at least 1, but got 0",
        ),
        ("estimate SM --threads 2", "protocol published has its threads fitted in, but got --threads 2"),
        ("estimate SM --ring-bits 32", "protocol published has its ring-bits fitted in"),
        ("estimate SM --budget-keys 1GB", "--budget-keys is of a dealer's keys, but protocol published has"),
        ("estimate SM --protocol sigma --seq-len 100", "but got 100; pad the prompt to 128 tokens"),
        ("estimate SM --protocol sigma --new-tokens 2", "but got 129; its code runs whole prompts"),
        ("compare SM --protocol sigma", "protocol sigma has no engine to compare with; choose one of semi2k"),
        ("estimate SM --protocol aby3 --threads 2", "aby3.yaml must be 2, but got 1; calibrate one"),
    ],
)
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

    monkeypatch.setattr(timed_run, "measure", measured)
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


@pytest.mark.needs_engine
def test_kinds_are_measured_twice_and_the_faster_runs_count(run, tmp_path, monkeypatch):
    num_passes = 0

    def measured(plan, protocol, setting, known):
        nonlocal num_passes
        num_passes += 1
        for series in plan:
            seconds = 3.0 if (num_passes == 1) == (series.kind == "Relu") else 1.0
            yield Timing(kind=series.name, start_s=9.0, seconds=(seconds,) * sum(series.repeats))

    monkeypatch.setattr(timed_run, "measure", measured)
    assert run("calibrate", "--protocol", "aby3", "--engine", "spu", "--output", "mine.yaml")[0] == 0
    assert num_passes == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert {kind.fixed_s for kind in load_compute(tmp_path / "mine.yaml").kinds.values()} == {1.0}


def test_as_a_process():
    command = [sys.executable, "-m", "costmodel", "estimate", "SM", "--seq-len", "9999"]
    result = subprocess.run(command, capture_output=True, text=True)
    said = "error: `seq_len` must be between 1 and the context 1024, but got 9999.\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", said)
