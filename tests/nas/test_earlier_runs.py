"""Runs made before there was a cost-model version, kept as they were: they plot and export, and resume at equal prices.

`earlier_runs/` holds a run under `published` and one under `semi2k` (tiny space, three trials of 512 tokens), with the
data they were trained on. Their cost-model ids are hashes of source files that no longer exist in that form.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nas import export, plot, status
from nas.results import ledger
from nas.study.run_folder import read_meta
from search_spaces.architecture import arch_id, load_architecture
from search_spaces.bases import base_architecture

EARLIER = Path(__file__).parent / "earlier_runs"

# The tokenizer of the run was trained by this release, whose number is part of the corpus's fingerprint.
RESUME = """
import sys
from nas.corpus import corpus
corpus.tokenizers_version = "0.23.3"
from nas.search import main
sys.exit(main(["--resume", sys.argv[1], "--num-trials", "4"]))
"""


@pytest.fixture(params=["published", "semi2k"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(EARLIER / "data", tmp_path / "data")
    return Path(shutil.copytree(EARLIER / request.param, tmp_path / request.param))


def resume(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    command = [sys.executable, "-c", RESUME, str(folder)]
    return subprocess.run(command, env=env, cwd=folder.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("folder", ["published"], indirect=True)
def test_it_is_extended_and_what_it_had_stays(folder: Path) -> None:
    before = ledger.read(folder / ledger.FILE_NAME)
    done = resume(folder)
    assert done.returncode == 0, done.stderr
    after = ledger.read(folder / ledger.FILE_NAME)
    assert after[: len(before)] == before
    assert [one.index for one in ledger.finished(after)] == [0, 1, 2, 3]
    assert read_meta(folder).ngrams is None
    assert not [line for line in done.stdout.splitlines() if "gram" in line and "unigram model" not in line]
    assert "floor" not in (folder / "pareto.csv").read_text()
    assert read_meta(folder).cost_model_id == after[-1].cost_model_id != before[0].cost_model_id


@pytest.mark.parametrize("folder", ["semi2k"], indirect=True)
def test_it_is_refused_since_seconds_are_others_now(folder: Path) -> None:
    before = (folder / ledger.FILE_NAME).read_text()
    done = resume(folder)
    assert done.returncode == 2
    assert "results of different cost_model_id are never mixed: start a new run" in done.stderr
    assert (folder / ledger.FILE_NAME).read_text() == before


def test_it_is_refused_where_the_cost_model_prices_it_otherwise(folder: Path) -> None:
    path = folder / ledger.FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["latency_s"] *= 1 + 1e-12
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = resume(folder)
    assert done.returncode == 2
    assert "`cost_model_id` of" in done.stderr
    assert path.read_text() == "".join(json.dumps(line) + "\n" for line in lines)


def test_it_is_shown_plotted_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_meta(folder).base == base_architecture("tiny")
    status.status(str(folder))
    shown = capsys.readouterr().out
    assert "Pareto front" in shown
    assert "trigram" not in shown
    plot.plot(str(folder))
    plot.plot(str(folder), protocol="aby3")
    assert (folder / "plots" / "pareto.png").stat().st_size > 0
    export.export(str(folder), pick="best", output_dir=str(folder / "out"))
    exported = load_architecture(folder / "out" / "architecture.yaml")
    assert arch_id(exported) in {one.arch_id for one in ledger.completed(ledger.read(folder / ledger.FILE_NAME))}
