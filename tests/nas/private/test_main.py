import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from glob import glob
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

import nas.private.__main__ as main
from costmodel.execution import interpreter
from nas.conversion.change_of_basis import inner_norm_linears
from nas.conversion.fixed_point_scale import with_inner_scales, with_stream_scale
from nas.conversion.fold import fold
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.private.model import PrivateModel, load_model
from nas.private.setup import require_public, resolve_setup
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.block import BlockName
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.conftest import refusals
from tests.costmodel.engine.test_session import until

PROMPT = "value_1 ="  # of all tests that may, so that the programs of one are those of others


@pytest.fixture
def peers(free_peers):
    return ",".join(f"{host}:{port}" for host, port in free_peers(2))


def party(export, rank, peers, *args):
    command = [sys.executable, "-m", "nas.private", str(export), "--party", str(rank), "--peers", peers, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.needs_engine
def test_an_answer_as_lines(run, export, tmp_path):
    (file := tmp_path / "prompt.txt").write_text(f"{PROMPT}\n")
    code, out, err = run(str(export), "--prompt-file", str(file), "--new-tokens", "2", "--weight-masks", "kept")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "masks of weights kept" in lines[0]
    assert lines[1].startswith("trust: 2 parties (or more), semi-honest")
    assert lines[2].startswith("  party 0 (client): has the prompt")
    assert lines[3].startswith("  party 1 (server): has the weights")
    rows = [line for line in lines if "  same  " in line]
    assert len(rows) == 2
    assert any(line.startswith("text: 'value_1 =") for line in lines)
    assert any("prefers the same on 2 of 2 (100.00%; 95 % interval 34.24% to 100.00%)" in line for line in lines)
    assert any("(equal); messages: " in line for line in lines)
    assert re.fullmatch(r"memory, by party: at most [\d.]+ [MG]B, [\d.]+ [MG]B", lines[-1])


@pytest.mark.needs_crypten
def test_an_answer_under_crypten(run, export):
    code, out, err = run(str(export), "--prompt", PROMPT, "--new-tokens", "2", "--protocol", "crypten")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "protocol crypten, ring of 64 bits, 16 of them fraction; CrypTen 0.4.1" in lines[0]
    assert "a dealer, a separate process" in lines[1]
    assert "the client, which could so learn the weights" not in lines[1]
    assert lines[4].startswith(
        "  party 2 (dealer): makes the masks of every product; sees the shapes of the model, but"
    )
    assert any("prefers the same on 2 of 2" in line for line in lines)
    assert any("(equal); messages: " in line for line in lines)
    assert re.fullmatch(r"memory, by party: at most( [\d.]+ [MG]B,){2} [\d.]+ [MG]B", lines[-1])


@pytest.mark.needs_crypten
def test_a_client_a_server_and_a_dealer_by_hand(run, export, tmp_path, free_peers):
    folder = shutil.copytree(export, tmp_path / "without_weights")
    (folder / "weights.safetensors").unlink()
    peers = ",".join(f"{host}:{port}" for host, port in free_peers(3))
    flags = ["--protocol", "crypten", "--wait", "60s"]
    others = [party(export, 1, peers, *flags), party(folder, 2, peers, *flags)]
    asked = ["--prompt", PROMPT, "--new-tokens", "2", "--format", "json"]
    code, out, err = run(str(folder), "--party", "0", "--peers", peers, *asked, *flags)
    assert (code, err) == (0, "")
    total = json.loads(out)["total"]
    assert total["measured"]["sent_bytes"] == total["predicted"]["sent_bytes"]
    for other, role in zip(others, ("server", "dealer"), strict=True):
        out, err = other.communicate(timeout=30)
        assert (other.returncode, err) == (0, "")
        assert f"({role}) at 127.0.0.1" in out
        assert "the client has left after 2 steps, in which this party sent" in out


@pytest.mark.needs_engine
def test_an_answer_as_json_is_sums_of_its_tokens(run, export):
    public = ["--public-layers", "embed,0", "--public-checkpoint", str(export)]
    asked = [str(export), "--prompt", PROMPT, "--new-tokens", "2", "--protocol", "aby3", *public]
    code, out, err = run(*asked, "--format", "json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert all(
        entry["holds"].endswith("; the weights of public layers embed,0, as all parties") for entry in answer["parties"]
    )
    assert [entry["role"] for entry in answer["parties"]] == ["client", "server", "helper"]
    assert answer["trust"]["threshold"] == "honest majority"
    for kind in ("measured", "predicted"):
        assert answer["total"][kind]["sent_bytes"] == sum(token[kind]["sent_bytes"] for token in answer["tokens"])
    assert answer["total"]["measured"]["sent_bytes"] == answer["total"]["predicted"]["sent_bytes"]
    assert answer["agreement"]["num_positions"] == len(answer["tokens"]) == 2
    peaks = [token["measured"]["peak_bytes"] for token in answer["tokens"]]
    assert answer["total"]["measured"]["peak_bytes"] == [max(of_party) for of_party in zip(*peaks, strict=True)]
    assert len(peaks[0]) == 3


@pytest.mark.needs_engine
def test_perplexities_say_which_ring_breaks_the_model(run, export, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text(f"value_{index % 7} = {index * index % 10_007}\n" * 20)
    flags = ["--perplexity", "32", "--data", str(tmp_path / "text")]
    code, out, err = run(str(export), *flags, "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert "sequence 1 of 1" in err
    usual, narrow = report["arithmetics"]
    assert (usual["ring_bits"], narrow["ring_bits"]) == (64, 32)
    assert usual["perplexity"] == pytest.approx(report["clear_perplexity"], rel=1e-2)
    assert usual["agreement"]["num_positions"] == report["sequences"] * report["seq_len"] == 24
    assert usual["measured"]["sent_bytes"] == usual["predicted"]["sent_bytes"]
    assert "`ring_bits` must be at least 64" in narrow["reason"]
    assert narrow["perplexity"] is None
    code, out, _ = run(str(export), *flags, "--fraction-bits", "4")
    row = next(line for line in out.splitlines() if "4 of them fraction  " in line)
    assert float(re.findall(r"([0-9.]+)%", row)[0]) < 90 < 100 * usual["agreement"]["top1"]
    assert "not run" not in out


@pytest.mark.needs_engine
def test_a_client_without_weights_and_a_server_by_hand(run, capsys, export, tmp_path, peers):
    folder = shutil.copytree(export, tmp_path / "client")
    (folder / "weights.safetensors").unlink()
    both = {"peers": peers, "weights": "server", "wait": "60s"}
    server = Thread(target=copy_context().run, args=(main.private, str(export)), kwargs=both | {"party": 1})
    server.start()
    asked = ["--prompt", PROMPT, "--new-tokens", "2", "--format", "json"]
    code, out, err = run(str(folder), "--party", "0", *(f"--{name}={value}" for name, value in both.items()), *asked)
    server.join(30)
    out += capsys.readouterr().out
    assert (code, err) == (0, "")
    answer = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert answer["agreement"] is None
    assert answer["total"]["measured"]["sent_bytes"] == answer["total"]["predicted"]["sent_bytes"]
    assert "this is party 1 (server) at 127.0.0.1" in out
    assert "the client has left after 2 steps, in which this party sent" in out


@pytest.mark.needs_engine
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killing_one_command_ends_the_other(run, export, killed, peers):
    asked = [["--prompt", PROMPT, "--new-tokens", "4"], []]
    other, killed_s = party(export, killed, peers, *asked[killed], "--wait", "60s"), []

    def kill():
        for line in other.stdout:
            if line.startswith(("token ", "ready; ")):  # what is above the first, or says that it may come
                break
        killed_s.append(time.monotonic())
        other.kill()

    (killing := Thread(target=kill)).start()
    code, _, err = run(str(export), "--party", str(1 - killed), "--peers", peers, *asked[1 - killed], "--wait", "60s")
    assert time.monotonic() - killed_s[0] < 10
    assert code == 1
    role = ("client", "server")[killed]
    assert err.startswith(f"error: party {killed} (the {role}, 127.0.0.1:")
    assert err.endswith("is gone; start all parties again.\n")
    assert len(err.splitlines()) == 1
    killing.join()
    other.communicate()


REFUSED = [
    *(pytest.param(*row, marks=pytest.mark.needs_engine) for row in refusals("refused.txt", __file__)),
    *(
        pytest.param(f"{args} --protocol crypten", line, marks=pytest.mark.needs_crypten)
        for args, line in refusals("refused_under_crypten.txt", __file__)
    ),
]


@pytest.mark.parametrize(("args", "line"), REFUSED)
def test_bad_input_is_one_line(run, export, args, line):
    code, _, err = run(str(export), *args.replace("EXPORT", str(export)).split())
    assert code == 2
    assert line in err
    assert len(err.splitlines()) == 1


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("number", "moment", "masks"),
    [
        (signal.SIGKILL, "", "fresh"),  # as soon as the parties have folders
        (signal.SIGTERM, "'", "kept"),  # behind the first token
        pytest.param(signal.SIGKILL, "'", "kept", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "ready after", "fresh", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_killed_leaves_neither_files_nor_processes(export, tmp_path, number, moment, masks):
    asked = ["--prompt-file", "-", "--new-tokens", "8", "--weight-masks", masks]
    command = [sys.executable, "-m", "nas.private", str(export), *asked]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as running:
        process: Any = running
        process.stdin.write("v")
        process.stdin.close()
        until(lambda: len(parties_of(tmp_path)) == 2, patience_s=200.0)
        while moment and not process.stdout.readline().startswith(moment):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(100) == (130 if number == signal.SIGTERM else -number)
        until(lambda: not parties_of(tmp_path) and not list(tmp_path.iterdir()), patience_s=200.0)
        assert process.stderr.read() == ("error: interrupted\n" if number == signal.SIGTERM else "")


def parties_of(folder):
    """The processes that were told of a folder in this one."""
    commands = {path.parent.name: path.read_bytes() for path in readable("/proc/[0-9]*/cmdline")}
    return [pid for pid, command in commands.items() if b"engine.party\0" + bytes(folder) in command]


def readable(pattern):
    for name in glob(pattern):
        with suppress(OSError):  # it has ended
            Path(name).read_bytes()
            yield Path(name)


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("/dev/zero", "--prompt-file must be a file of text or -, but {} is no regular file."),
        (b"v" * (1 << 24) + b"v", "--prompt-file must have at most 16777216 bytes"),
        (b"\xff", "--prompt-file must be a file of text or -, but {} cannot be read: it is not UTF-8."),
        (None, "--prompt-file must be a file of text or -, but {} cannot be read: No such file or directory."),
        (b"\n", "--prompt must be text, such as 'def f(x):', but is empty."),
        (b"", "--prompt must be text, such as 'def f(x):', but is empty."),
        (b"v" * 40, "must fit into the context of 24 tokens"),
    ],
)
def test_a_file_that_is_no_prompt_is_one_line(run, export, tmp_path, monkeypatch, content, line):
    file = tmp_path / "prompt.txt"
    if isinstance(content, str):
        file.symlink_to(content)
    elif content is not None:
        file.write_bytes(content)
    if "context" not in line:  # what only a model tells
        monkeypatch.setattr(main, "resolve_setup", None)
    code, _, err = run(str(export), "--prompt-file", str(file))
    assert code == 2
    assert line.format(file) in err
    assert len(err.splitlines()) == 1


def test_weights_must_be_those_of_the_checkpoint(export):
    checkpoint = load_model(str(export), "knee")
    assert checkpoint.weights is not None
    name = "layers.0.ffn.up.weight"
    changed = checkpoint.weights[name].copy()
    changed[0, 0] = np.nextafter(changed[0, 0], np.inf)
    tuned = replace(checkpoint, weights={**checkpoint.weights, name: changed})
    require_public(tuned, "embed,head", None, checkpoint)
    require_public(tuned, None, 0, checkpoint)
    with pytest.raises(ValueError, match=f"but '{name}' differs .*; leave layer 0 out, or give the checkpoint that"):
        require_public(tuned, "embed,0", None, checkpoint)
    with pytest.raises(ValueError, match=f"but '{name}' differs .*; leave layer 0 out"):
        require_public(tuned, None, 1, checkpoint)
    missing = replace(checkpoint, weights={key: value for key, value in tuned.weights.items() if key != name})
    with pytest.raises(ValueError, match=f"but '{name}' is not in it .*; leave layer 0 out"):
        require_public(tuned, "0", None, missing)


@pytest.fixture
def llama(tokenizer):
    """`llama(factor, inner)`: folded, with its stream, and what the inner norms of another block read, times that."""
    base = base_architecture("smollm2-135m", Dimensions(layers=2, heads=2, kv_heads=1, d_model=16, d_ff=24, vocab=280))

    def made(factor: float, inner: float = 1.0, block: BlockName = "llama") -> PrivateModel:
        architecture = parse("SM+RMS+SwiGLU", replace(base, block=block)).architecture
        torch.manual_seed(0)
        scaled = with_stream_scale(architecture, deployed_weights(Decoder(architecture)), factor)
        factors = {norm: inner for norm, *_ in inner_norm_linears(architecture)}
        folded = fold(*with_inner_scales(*scaled, factors))
        arrays = {name: value.double().numpy() for name, value in folded.weights.items()}
        return PrivateModel(
            name="llama", architecture=folded.architecture, weights=arrays, tokenizer=tokenizer, corpus=None
        )

    return made


def test_streams_of_both_may_differ_by_a_power_of_two(llama):
    whole, half = llama(1.0), llama(0.5)
    require_public(half, "embed,0-1,head", 1, whole)
    logits = [interpreter.execute(lower(model.architecture, 8), model.weights, np.arange(8)) for model in (whole, half)]
    assert logits[0] == pytest.approx(logits[1], abs=1e-12)
    for block in ("gemma3", "olmo2"):
        require_public(llama(0.5, 8.0, block), "embed,0-1,head", 1, llama(4.0, 1.0, block))
    mixed = replace(half, weights=half.weights | {"embed.weight": whole.weights["embed.weight"]})
    with pytest.raises(ValueError, match=r"'embed.weight' differs"):
        require_public(mixed, "embed", None, whole)
    third = replace(half, architecture=replace(half.architecture, norm_epsilon=whole.architecture.norm_epsilon / 9))
    with pytest.raises(ValueError, match=r"powers of two, .* do by 0.333333 .llama.; give the checkpoint"):
        require_public(third, "0", None, whole)


def test_a_client_without_weights_runs_layers_of_the_same_stream_and_shapes(llama):
    whole, half = llama(1.0), replace(llama(0.5), weights=None)
    with pytest.raises(ValueError, match=r"at a party without weights, but do by 0.5 .*, or the export"):
        require_public(half, None, 1, whole)
    here = replace(whole, weights=None)
    require_public(here, "embed,0", 1, whole)
    name = "layers.0.ffn.up.weight"
    with pytest.raises(ValueError, match=f"but '{name}' differs"):
        require_public(here, None, 1, replace(whole, weights=whole.weights | {name: whole.weights[name][1:]}))
    others = {key: value for key, value in whole.weights.items() if key != name}
    with pytest.raises(ValueError, match=f"but '{name}' is not in it"):
        require_public(here, None, 1, replace(whole, weights=others))


def test_a_party_opens_the_checkpoint_if_it_compares_or_computes(export, tmp_path):
    here = shutil.copytree(export, tmp_path / "copy")
    (here / "weights.safetensors").unlink()
    for party, layers, is_opened in ((0, "client", True), (0, "public", False), (2, "client", False)):
        given = {"client_layers": 0} if layers == "client" else {"public_layers": "0"}
        setup = resolve_setup(str(here), "knee", party=party, public_checkpoint=str(export), **given)
        assert (setup.client_weights is not None) == is_opened
    for given in ({"public_layers": "0"}, {"client_layers": 0}, {"public_checkpoint": str(export)}):
        with pytest.raises(ValueError, match="--public-checkpoint goes with .*; give both, or none"):
            resolve_setup(str(export), "knee", party=None, **given)
