"""What a stranger's file does to a command: one line, exit code 2, in little time and memory. Each kind has a row."""

import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import costmodel.__main__
import nas.export
import nas.plot
import nas.private.__main__
import nas.report.__main__
import nas.search
import nas.status
import nas.train
import search_spaces.__main__
from costmodel.calibration.microbenchmark import saved
from costmodel.config import cli
from costmodel.config.files import MOST_LEVELS, dump, load_mapping
from costmodel.engine.keys import Keys
from costmodel.errors import UserError
from costmodel.execution.interpreter import load_weights
from costmodel.ops import OpGraph
from nas.conversion.huggingface import _require_files_of_its_own
from nas.conversion.pretrained import Pretrained, read_export, write_pretrained
from nas.corpus.documents import GivenTokenizer
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import given_encoder, kept_tokenizer
from nas.private.prompt import given_text
from nas.training import checkpoint
from tests.small_models import GPT2

STORED = Path(__file__).parent / "nas" / "run" / "stored"
NO_OPS = OpGraph(nodes=())
MOST_MEMORY = 1 << 30  # bytes that a command may take beyond what the process of the tests has

pytestmark = pytest.mark.timeout(60)


def deep(opening: str, closing: str, levels: int = 100_000) -> str:
    return opening * levels + closing * levels


def bomb(levels: int = 12) -> str:
    """600 bytes of YAML that stand for 9^12 texts."""
    lines = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *lines])


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


NODES: dict[str, Callable[[Path], object]] = {  # what is no regular file, or too large a one
    "fifo": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "sparse terabyte": sparse,
    "link to itself": lambda path: path.symlink_to(path),
}
YAMLS = {
    "bomb": bomb(),
    "anchor": "name: &x a",
    "recursive alias": "name: &x [*x]",
    "merge key": "<<: {name: a}",
    "deep list": f"name: {deep('[', ']')}",
    "deep blocks": "- " * 50_000,
    "just too deep": f"name: {deep('[', ']', MOST_LEVELS)}",
    "too many digits": f"name: 0x{'f' * 5_000}",
    "sexagesimal digits": f"name: 1{':10' * 5_000}",
    "null character": 'name: "a\\0.yaml"',
    "code": "name: !!python/object/apply:os.getcwd []",
    "number": "7",
    "list": "[name, a]",
    "list for names": "{name: [a], base: {}, protocol: [x], space: [1], arch: {a: 1}, network: [], notation: 3}",
    "other bytes": "\udcff",
}
AT_EVERY_READER = ("bomb", "null character", "code", "list for names")
JSONS = {
    "deep list": deep("[", "]"),
    "deep mapping": deep('{"versions": ', "}").replace(": }", ": 1}", 1),
    "just too deep": f'{{"versions": {deep("[", "]", MOST_LEVELS)}}}',
    "too many digits": f'{{"seed": {"9" * 5_000}}}',
    "number": "7",
    "list": "[[], 7]",
    "nothing": "null",
    "list for a version": '{"schema_version": [1]}',
    "half a pair": '{"schema_version": "\\ud800"}',
    "other bytes": "\udcff",
}
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {  # what reads a YAML file
    "network": (costmodel.__main__.main, "estimate SM --seq-len 4 --protocol semi2k --network {}"),
    "testbed": (costmodel.__main__.main, "estimate SM --seq-len 4 --protocol semi2k --testbed {}"),
    "architecture": (costmodel.__main__.main, "estimate {} --seq-len 4"),
    "configuration": (costmodel.__main__.main, "estimate --config {}"),
    "space": (search_spaces.__main__.main, "count {}"),
    "searched space": (nas.search.main, "--dry-run --budget-latency 5min --space {}"),
    "search": (nas.search.main, "--dry-run --config {}"),
    "trained architecture": (nas.train.main, "{} --scale smoke"),
    "compared network": (costmodel.__main__.main, "compare SM --seq-len 4 --network {}"),
    "private answer": (nas.private.__main__.main, "--config {}"),
    "calibration": (costmodel.__main__.main, "calibrate --config {}"),
    "testbed of sigma": (costmodel.__main__.main, "estimate SM --seq-len 4 --protocol sigma --testbed {}"),
    "testbed of ckks": (costmodel.__main__.main, "estimate SM --seq-len 4 --protocol ckks --testbed {}"),
}


def resume(args: list[str]) -> object:
    return nas.search.main(["--resume", *args])


READERS: dict[str, list[Callable[..., Any]]] = {
    "run.yaml": [nas.status.main, resume],
    "train.yaml": [lambda args: nas.train.main(["--resume", *args])],
    "training.yaml": [nas.private.__main__.main],
    "trained.yaml": [nas.private.__main__.main],
    "meta.json": [nas.plot.main, resume],
    "trials.jsonl": [nas.report.__main__.main, resume],
}
RECORDS: dict[str, tuple[dict[str, Any], str]] = {  # what is changed in a row of a ledger, and what is said of it
    "another schema": ({"schema_version": 5}, "`schema_version` must be 6, but got 5"),
    "a text for a number": ({"index": "a"}, "`index` of .* must be of type int, but got 'a'"),
    "a number for a text": ({"split": 7}, "`split` of .* must be of type str, but got 7"),
    "a key of another version": ({"evil": 1}, "has the unknown key 'evil'"),
    "a folder above": ({"trial_id": "../../.."}, "`trial_id` of .* must be letters and digits"),
    "another folder": ({"arch_id": "/tmp/made"}, "`arch_id` of .* must be letters and digits"),
    "a null character": ({"candidate_id": "a\0b"}, "`candidate_id` of .* must be letters and digits"),
    "an escape": ({"deployed_id": "\x1b[31m"}, r"`deployed_id` of .* but got '\\x1b\[31m'"),
    "a long name": ({"trial_id": "a" * 5000}, "`trial_id` of .* must be letters and digits"),
    "no name": ({"trial_id": ""}, "`trial_id` of .* must be letters and digits"),
    "a loss too large": ({"val_loss": 1e308}, r"the loss of trial .* from 0 to 700 .* but got 1e\+308"),
    "a loss below none": ({"val_loss": -5.0}, "the loss of trial .* from 0 to 700 .* but got -5.0"),
    "no loss": ({"val_loss": None}, "`val_loss` of trial .* must be a number once it has completed"),
    "a huge integer": ({"tokens": 10**400}, r"`tokens` of trial .* from 0 to 1e\+18, but got 1000"),
    "a cost that is no number": ({"rounds": float("nan")}, r"`rounds` of trial .* from 0 to 1e\+18, but got nan"),
    "a cost below none": ({"latency_s": -1.0}, r"`latency_s` of trial .* from 0 to 1e\+18, but got -1.0"),
    "seconds without end": ({"seconds": float("inf")}, r"`seconds` of trial .* from 0 to 1e\+18, but got inf"),
}

PARENT = {"name": "parent", "notation": "SM", "latency_s": 1.0}
METAS: dict[str, tuple[dict[str, Any], str]] = {  # what is changed in a meta.json, and what is said of it
    "a loss without a perplexity": ({"parent": PARENT | {"val_loss": 1e308}}, "the loss of the parent must be from 0"),
    "no reference": ({"reference": [1.0, float("nan")]}, "the loss of the unigram model must be .* but got nan"),
    "no vocabulary": ({"vocab_size": 0}, "`vocab_size` of a run must be at least 1, but got 0"),
    "baselines out of range": (
        {"ngrams": {"tokens": 1, "losses": [1e308] * 5}}, "the loss of n-gram models must be from 0 to 700 nats",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(main: Callable[..., Any], args: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What a command says of bad input: one line, and exit code 2."""
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main(args))
    out, err = capfd.readouterr()
    assert (left.value.code, out, err.count("\n")) == (cli.USAGE, "", 1), err
    assert err.startswith("error: ")
    assert "bug" not in err
    return err


def place(path: Path, kind: str, texts: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    NODES[kind](path) if kind in NODES else path.write_text(texts[kind], encoding="utf-8", errors="surrogateescape")


@pytest.mark.parametrize("kind", [kind for kind in YAMLS if kind != "list for names"])
def test_a_hostile_text_is_no_mapping(tmp_path, kind):
    place(path := tmp_path / "x.yaml", kind, YAMLS)
    with pytest.raises(UserError) as error:
        load_mapping(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [*NODES, *AT_EVERY_READER])
@pytest.mark.parametrize("role", COMMANDS)
def test_a_hostile_yaml_file_is_refused_in_one_line(tmp_path, capfd, role, kind):
    place(path := tmp_path / "x.yaml", kind, YAMLS)
    main, arguments = COMMANDS[role]
    refused(main, arguments.format(path).split(), capfd)


@pytest.mark.parametrize(
    ("name", "kind", "reader"),
    [
        (name, kind, reader)
        for names, kinds in (
            (("run.yaml", "train.yaml"), (*NODES, *AT_EVERY_READER)),
            (("training.yaml", "trained.yaml"), ("sparse terabyte", *AT_EVERY_READER)),
            (("meta.json", "trials.jsonl"), (*NODES, *JSONS)),
        )
        for name in names
        for kind in kinds
        for reader in READERS[name]
    ],
)
def test_a_damaged_run_is_refused_in_one_line(tmp_path, capfd, name, kind, reader):
    run = shutil.copytree(STORED / "semi2k", tmp_path / "run")
    place(run / name, kind, {each: f"{text}\n" for each, text in (YAMLS if name.endswith(".yaml") else JSONS).items()})
    refused(reader, [str(run)], capfd)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        *(pytest.param("trials.jsonl", *RECORDS[kind], id=kind) for kind in RECORDS),
        *(pytest.param("meta.json", *METAS[kind], id=kind) for kind in METAS),
    ],
)
def test_a_hostile_value_in_the_json_of_a_run_is_refused_in_one_line(tmp_path, capfd, name, change, why):
    run = shutil.copytree(STORED / "semi2k", tmp_path / "run")
    *rows, last = (run / name).read_text().splitlines() if name == "trials.jsonl" else [(run / name).read_text()]
    (run / name).write_text("\n".join([*rows, json.dumps(json.loads(last) | change)]) + "\n")
    assert re.search(why, refused(resume, [str(run)], capfd))


@pytest.mark.parametrize("kind", ["fifo", "endless device", "link to itself", "link to a folder"])
@pytest.mark.parametrize("name", [".lock", "trials.csv", "plots", "report.html", "trials/a/metrics.csv"])
def test_a_run_has_files_of_its_own(tmp_path, capfd, name, kind):
    """A pipe would hang what writes to it, and a link would lead it elsewhere."""
    run = shutil.copytree(STORED / "semi2k", tmp_path / "run")
    (run / name).parent.mkdir(exist_ok=True)
    if kind == "link to a folder":
        (run / name).symlink_to(tmp_path)
    else:
        NODES[kind](run / name)
    for read in (nas.status.main, nas.plot.main, resume):
        printed = refused(read, [str(run)], capfd)
        assert re.search("run/.* must be a file or folder of the run itself, but is a link, ", printed)


TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<e>": 2}, "merges": []},
}  # fmt: skip


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def splitting(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def steps(name: str, step: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: [step] * 30}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLED = replacing({"String": "a"}, "aa")
TOKENIZERS = {
    "an expression that gives up": {"pre_tokenizer": splitting("(a+)+b")},
    "an expression that is none": {"pre_tokenizer": splitting("[")},
    "megabytes for a letter": {"normalizer": replacing({"String": "a"}, "a" * 10_000_000)},
    "a letter doubled thirty times": {"normalizer": steps("normalizers", DOUBLED)},
    "a letter between all letters": {"normalizer": steps("normalizers", replacing({"Regex": ""}, "a"))},
    "bytes of bytes": {"pre_tokenizer": steps("pretokenizers", BYTES)},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}},
    "no table of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAD/////////"}},
    "a decoder that doubles": {"decoder": steps("decoders", DOUBLED)},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a prefix longer than its token": {
        "model": TOKENIZER["model"] | {
            "continuing_subword_prefix": "ééé", "vocab": {"a": 0, "b": 1, "ab": 2, "<e>": 3}, "merges": [["a", "b"]],
        }
    },
    "a long token": {"model": TOKENIZER["model"] | {"vocab": {"a": 0, "b" * 10_000: 1, "<e>": 2}}},
    "a model that is a list": {"model": []},
    "a step that is a number": {"normalizer": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_in_one_line(capfd, kind):
    given = GivenTokenizer(name="given", json=json.dumps(TOKENIZER | TOKENIZERS[kind]), end_of_text="<e>")
    with pytest.raises(UserError, match="the tokenizer .*given.* must ") as error:
        given_encoder(given, None, None).encode(["a" * 60 + "c"])
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")  # what the package writes of its panics


@pytest.mark.parametrize("kind", [*NODES, *JSONS])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_hostile_file_of_a_tokenizer_is_refused(tmp_path, name, kind):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}}')
    assert given_encoder(kept_tokenizer(tmp_path, "kept"), None, None).end == 2
    (tmp_path / name).unlink()
    place(tmp_path / name, kind, JSONS)
    with pytest.raises(UserError):
        given_encoder(kept_tokenizer(tmp_path, "kept"), None, None)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 10_000])
def test_damaged_settings_of_generation_are_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json must be a mapping of settings"):
        kept_tokenizer(tmp_path, "kept")


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet", "data/x.py"])
def test_hostile_text_is_refused(tmp_path, name, kind):
    (tmp_path / "data").mkdir()
    place(tmp_path / name, kind, {})
    with pytest.raises(UserError):
        open_source(str(tmp_path / name.partition("/")[0]))


BINARY: dict[str, Callable[[Path], object]] = {  # a file, and what reads it
    "model.safetensors": lambda folder: _require_files_of_its_own(str(folder)),
    "weights.safetensors": read_export,
    "measured.safetensors": lambda folder: load_weights(folder / "measured.safetensors", NO_OPS),
    "1.pem": lambda folder: Keys(folder, 0, 2),
    "key.pem": lambda folder: Keys(folder, 0, 2),
    "prompt.txt": lambda folder: given_text(None, str(folder / "prompt.txt")),
    "timings.jsonl": lambda folder: saved(folder / "timings.jsonl"),
}


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("name", BINARY)
def test_what_is_no_regular_file_is_refused_by_every_reader(tmp_path, name, kind):
    if name == "weights.safetensors":
        write_pretrained(Pretrained(GPT2, {}, None), tmp_path)
        (tmp_path / "checksums.json").unlink()
    for each in ("key.pem", "0.pem", "1.pem") if name.endswith(".pem") else ():
        (tmp_path / each).write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / name).unlink(missing_ok=True)
    NODES[kind](tmp_path / name)
    if (name, kind) == ("timings.jsonl", "link to itself"):
        assert BINARY[name](tmp_path) == ()  # which is as none: all is measured
        return
    with pytest.raises(UserError) as error:
        BINARY[name](tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.needs_hf
@pytest.mark.parametrize("files", [{"a": "../b.safetensors"}, {"a": "/dev/zero"}, {"a": 3}, [], None])
def test_the_list_of_a_checkpoint_names_only_files_beside_it(tmp_path, files):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UserError, match="`weight_map` of .* must map weights to files beside it"):
        _require_files_of_its_own(str(tmp_path))


def test_a_checkpoint_reads_no_file_outside_its_folder(tmp_path):
    folder = tmp_path / checkpoint.FOLDER / "step-00000001"
    folder.mkdir(parents=True)
    state = {"step": 1, "identity": {}, "progress": {}, "sha256": {"../../../../../../../dev/zero": "x"}}
    (folder / checkpoint.STATE_FILE).write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="damaged|no whole checkpoint"):
        assert checkpoint.load_latest(tmp_path) is None


def test_control_characters_of_a_run_are_shown_escaped_and_its_names_draw_no_formula(tmp_path, capfd):
    run = shutil.copytree(STORED / "semi2k", tmp_path / "run")
    ledger = run / "trials.jsonl"
    ledger.write_text(ledger.read_text().replace('"tokenizer":"', '"tokenizer":"$x^$<script>`|'))
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps(meta | {"tokenizer": "$x^$\u001b]0;title\u0007\u009b31m\u202e"}))
    config = load_mapping(run / "run.yaml")
    (run / "run.yaml").write_text(dump(config | {"data": "<script>alert(1)</script>`$x^$\n```\n![](a)"}))
    export = ["--pick", "best", "--output-dir", str(tmp_path / "out")]
    mains = {nas.status.main: [], nas.plot.main: [], nas.report.__main__.main: [], nas.export.main: export}
    for main, more in mains.items():
        with pytest.raises(SystemExit) as left:
            raise SystemExit(main([str(run), *more]))
        out, err = capfd.readouterr()
        assert left.value.code == 0, err
        assert not {*out, *err} & {*"\x1b\x07\x9b\u202e"}
        assert main is not nas.status.main or r"\x1b]0;title\x07\x9b31m\u202e" in out
    assert "<script>" not in (run / "report.html").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "$x^$&#60;script>&#96;&#124;" in card  # of the tokenizer's name, in a sentence
    assert "```` <script>alert(1)</script>`$x^$ ``` ![](a) ````" in card  # in the command, and as code in a line
