import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from safetensors import safe_open

from costmodel.config.bugs import BugError
from costmodel.config.files import load_mapping
from costmodel.errors import UserError
from nas import export, search, status
from nas.conversion.pretrained import read_export
from nas.corpus.corpus import prepare
from nas.corpus.ngrams import ngram_baseline
from nas.export import prepare_export
from nas.recipe.recipe import SCALES
from nas.run import ledger
from nas.run.folder import read_config, read_meta
from nas.run.members import front
from nas.run.run import Run
from search_spaces.architecture import arch_id, load_architecture
from search_spaces.budget.priced_space import price_architecture
from tests.conftest import python, refusals, trials_here, write_email

SPACE = "--space tiny --scale smoke --seq-len 32 --seed 3"
TOKENS = 4096
ARGS = f"--budget-latency 6.22s --finalist-seeds 1 --num-proxy-evals 4 --tokens {TOKENS} {SPACE}".split()
SMALL = "--budget-latency 6.22s"
NUM_TRIALS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small corpus and a cache of its own, shared by the runs of this module."""
    folder = tmp_path_factory.mktemp("search")
    write_email(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def finished(root):
    """A run in the default folder that nobody disturbed: (folder, what it printed)."""
    args = (*ARGS, "--data", str(root / "corpus"), "--num-trials", str(NUM_TRIALS), "--max-concurrent", "1")
    with pytest.MonkeyPatch.context() as patch, trials_here(), redirect_stdout(StringIO()) as printed:
        patch.chdir(root)
        assert search.main([*args]) == 0
    (folder,) = (root / "runs").iterdir()
    return folder, printed.getvalue()


@pytest.fixture
def search_here(root, without_ray, capsys):
    """Runs a search in this process; what it printed, as `out` and `err`."""

    def run(*args: str):
        capsys.readouterr()
        code, printed = search.main(list(args)), capsys.readouterr()
        assert code == 0, printed.err
        return printed

    return run


def results(folder: Path) -> list[tuple[object, ...]]:
    """What must not depend on timing: finished records without clocks, and entropies at every step looked into."""
    found: list[tuple[object, ...]] = []
    for record in finished_records(folder):
        lines = (folder / "trials" / record.trial_id / "diagnostics.jsonl").read_text().splitlines()
        entropies = tuple(json.dumps(json.loads(line)["head_entropies"]) for line in lines)
        found.append((record.trial_id, record.status, record.val_loss, record.steps, record.latency_s, entropies))
    return found


def test_a_run_leaves_everything_it_promises(finished):
    folder, printed = finished
    for name in (*("run.yaml", "meta.json", "trials.jsonl", "trials.csv"), "pareto.csv", "plots/pareto.png"):
        assert (folder / name).stat().st_size > 0, name
    records = finished_records(folder)
    assert [record.index for record in records][:NUM_TRIALS] == list(range(NUM_TRIALS))
    assert {record.role for record in records[:NUM_TRIALS]} == {"candidate"}
    assert all(record.latency_s <= 6.22 for record in records)
    rows = list(csv.DictReader((folder / "pareto.csv").read_text().splitlines()))
    assert rows
    for row in rows:
        assert row["status"] == "completed"
        assert arch_id(load_architecture(folder / "architectures" / f"{row['arch_id']}.yaml")) == row["arch_id"]
        assert float(row["floor_trigram"]) == pytest.approx(read_meta(folder).ngrams.perplexity(3))
    assert str(folder / "plots" / "pareto.png") in printed
    assert f"report: {folder / 'report.html'}\n" in printed
    assert "scale smoke" in printed


def test_the_front_is_trained_with_one_more_seed_and_says_so(finished, capsys):
    folder, printed = finished
    records = ledger.read(folder / ledger.FILE_NAME)
    replicates = [record for record in ledger.finished(records) if record.role == "replicate"]
    members = front(records, read_config(folder).budget)
    assert {record.seed for record in replicates} == {4}
    assert all(record.tokens == records[-1].tokens for record in replicates)  # to the end
    again = [member for member in members if member.num_seeds == 2]
    assert again  # one that came in when as many were trained again as may be has one seed
    assert all(f"{member.perplexity:.2f} ±" in printed for member in again)
    assert "1 to 2 seeds" in printed
    rows = list(csv.DictReader((folder / "pareto.csv").read_text().splitlines()))
    assert [float(row["perplexity"]) for row in rows] == [member.perplexity for member in members]
    status.status(str(folder))
    shown = capsys.readouterr().out
    assert f"{len(replicates)}/{len(replicates)} more seeds" in shown
    assert all(f"{member.perplexity:.2f} ±" in shown for member in again)
    assert "nothing is running" not in shown
    assert "Pareto front" in shown
    assert f"(trigram {read_meta(folder).ngrams.perplexity(3):.2f})" in shown


def test_the_floor_is_of_the_tokens_and_the_validation_of_the_trials(finished, root):
    folder, printed = finished
    scale = replace(SCALES["smoke"], seq_len=32, tokens=TOKENS)
    corpus = prepare(str(root / "corpus"), 512)
    validated = scale.validation_tokens
    expected = ngram_baseline(corpus, seq_len=32, validation_tokens=validated, tokens=scale.tokens, seed=3)
    assert read_meta(folder).ngrams == expected
    assert expected.tokens == ledger.completed(ledger.read(folder / ledger.FILE_NAME))[0].tokens
    assert f"n-gram baselines, perplexity after {expected.tokens:,} training tokens: unigram " in printed


def test_sequences_of_training_can_be_longer_than_the_prompt(root, tmp_path, capsys):
    ends = f"--num-trials 1 --finalist-seeds 0 --num-proxy-evals 0 --tokens 1024 --data {root / 'corpus'}"
    with trials_here():
        assert search.main([*f"{SMALL} {SPACE} --train-len 64 {ends} --output-dir {tmp_path / 'run'}".split()]) == 0
    run = Run.read(tmp_path / "run")
    (record,) = ledger.completed(run.records)
    assert run.meta.recipe.scale.seq_len == 64
    assert run.workload.prompt_len == 32
    price = price_architecture(ledger.deployed_of(record, run.base), run.pricer, run.workload, "unfolded")
    assert record.latency_s == price.price.latency_s
    assert "1,024 training tokens per candidate in sequences of 64, one seed" in capsys.readouterr().out
    assert "1,024 tokens per candidate in sequences of 64, bpe" in (tmp_path / "run" / "report.html").read_text()
    export.write_export(prepare_export(run, run.pick("best"), fold=False), tmp_path / "mpc", "mpc")
    assert json.loads((tmp_path / "mpc" / "graph.json").read_text())["seq_len"] == 32


@pytest.mark.filterwarnings("ignore", "always:.*torn last line")
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_run_that_was_stopped_resumes_to_the_same_numbers(finished, root, search_here, number):
    whole, _ = finished
    folder = root / f"stopped-{number}"
    args = (*ARGS, "--data", str(root / "corpus"), "--num-trials", str(NUM_TRIALS), "--output-dir", str(folder))
    command, pipe = [sys.executable, "-m", "nas.search", *args], subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True) as process:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and num_finished(folder) < 2:
            time.sleep(0.05)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=60)
    assert 2 <= num_finished(folder) < num_finished(whole)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert f"continue with --resume {folder}" in printed
        assert errors == "error: interrupted\n"
        assert (folder / "trials.csv").read_text().count("\n") >= 2
    with (folder / ledger.FILE_NAME).open("ab") as file:
        file.write(b'{"schema_version":1,"event":"fin')
    assert "torn last line" in search_here("--resume", str(folder)).err
    assert results(folder) == results(whole)


def test_ctrl_c_in_the_driver_saves_and_says_how_to_go_on(root, monkeypatch, capsys):
    folder = root / "interrupted"

    def interrupted(*rest, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("nas.study.ray_tune.run_trials", interrupted)
    args = [*ARGS, "--data", str(root / "corpus"), "--num-trials", "1", "--output-dir", str(folder)]
    assert search.main(args) == 130
    printed = capsys.readouterr()
    assert f"continue with --resume {folder}" in printed.out
    assert printed.err == "error: interrupted\n"
    assert (folder / "trials.csv").exists()


def num_finished(folder: Path) -> int:
    path = folder / ledger.FILE_NAME
    return path.read_text().count('"event":"finished"') if path.exists() else 0


def test_a_finished_run_is_extended(finished, search_here):
    folder, _ = finished
    before = results(folder)
    search_here("--resume", str(folder), "--num-trials", str(NUM_TRIALS + 2), "--max-concurrent", "1")
    after = results(folder)
    assert [name for name, *_ in after][:NUM_TRIALS] == [name for name, *_ in before][:NUM_TRIALS]
    assert {result for result in before if result[1] == "completed"} <= set(after)  # what was paused may go on
    assert len(candidates(folder)) == NUM_TRIALS + 2
    assert read_config(folder).num_trials == NUM_TRIALS + 2


def test_a_resumed_run_takes_another_budget(finished, root, search_here):
    folder = root / "other-budget"
    shutil.copytree(finished[0], folder)
    before = {record.candidate_id: record.val_loss for record in candidates(folder)}
    search_here("--resume", str(folder), "--budget-latency", "6.2s", "--num-trials", str(NUM_TRIALS + 2))
    after = {record.candidate_id: record for record in candidates(folder)}
    assert {name: after[name].val_loss for name in before} == before
    assert all(record.latency_s <= 6.2 for name, record in after.items() if name not in before)
    assert read_meta(folder).reference[0] == read_config(folder).budget.latency_s == 6.2


def finished_records(folder: Path) -> tuple[ledger.Record, ...]:
    return ledger.finished(ledger.read(folder / ledger.FILE_NAME))


def candidates(folder: Path) -> list[ledger.Record]:
    """Those that were trained to their end."""
    return [record for record in ledger.completed(finished_records(folder)) if record.role == "candidate"]


def test_status_shows_why_a_trial_failed_and_where_its_traceback_is(finished, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(finished[0], folder)
    record = finished_records(folder)[-1]
    reason = "bug: TypeError: no; traceback in /elsewhere/traceback.txt"  # the run was moved since
    ledger.append(folder / ledger.FILE_NAME, replace(record, status="failed", reason=reason))
    path = folder / "trials" / record.trial_id / "traceback.txt"
    status.status(str(folder))
    assert "traceback:" not in capsys.readouterr().out
    path.write_text("Traceback")
    status.status(str(folder))
    assert f"failed: {record.notation} ({record.trial_id}): {reason}\n  traceback: {path}\n" in capsys.readouterr().out


def test_a_bug_in_the_driver_is_one_line_in_the_run_folder_and_the_run_goes_on(root, search_here, monkeypatch, capsys):
    folder = root / "bug"
    args = [*ARGS, "--data", str(root / "corpus"), "--num-trials", "1", "--output-dir", str(folder)]

    def broken(*rest, **more):
        raise TypeError("no run")

    with monkeypatch.context() as patch:
        patch.setattr("nas.study.ray_tune.run_trials", broken)
        assert search.main(args) == 1
        with pytest.raises(BugError) as info:
            search.main(["--resume", str(folder), "--debug"])
        assert isinstance(info.value.__cause__, TypeError)
    path = folder / "traceback.txt"
    assert "in broken\n    raise TypeError" in path.read_text()
    assert capsys.readouterr().err == (
        f"error: unexpected TypeError: no run; this is a bug: the traceback is in {path}; what was trained is saved; "
        f"continue with --resume {folder}\n"
    )
    search_here("--resume", str(folder), "--max-concurrent", "1")


def test_export_is_complete_and_priced(finished, tmp_path):
    folder, _ = finished
    args = [str(folder), "--pick", "best", "--format", "yaml", "--output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="^0$"):
        export.main(args)
    assert read_export(tmp_path / "out").tokenizer is not None
    architecture = load_architecture(tmp_path / "out" / "architecture.yaml")
    with safe_open(tmp_path / "out" / "weights.safetensors", framework="pt") as weights:
        assert "layers.0.attention.out.weight" in set(weights.keys())
    facts = (tmp_path / "out" / "export.yaml").read_text()
    assert arch_id(architecture) in facts
    assert "cost_model_id" in facts
    result = load_mapping(tmp_path / "out" / "export.yaml")["result"]
    ngrams = read_meta(folder).ngrams
    assert result["ngram_floors"] == {"tokens": ngrams.tokens, "perplexities": ngrams.perplexities}
    assert result["knows_less_than_trigram"] == (result["perplexity"] > ngrams.perplexity(3))
    with pytest.raises(ValueError, match="must be new or empty"):
        export.export(str(folder), output_dir=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="--pick must be knee, best or the arch_id"):
        export.export(str(folder), pick="worst")
    run = Run.read(folder)
    with pytest.raises(ValueError, match="must have a whole checkpoint of step 1"):
        prepare_export(run, replace(run.completed[0], steps=1))


@pytest.mark.parametrize("error", [UserError("this needs transformers"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing(error, finished, tmp_path, monkeypatch):
    def failing(made, target):
        (target / "config.json").write_text("{}")
        raise error

    monkeypatch.setitem(export.FORMATS, "hf", failing)
    with pytest.raises(type(error)):
        export.export(str(finished[0]), format="hf", output_dir=str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_a_folded_export_is_written_in_every_format(finished, tmp_path):
    folder, _ = finished
    run = Run.read(folder)
    made = prepare_export(run, run.completed[0], fold=True)
    export.write_export(made, tmp_path / "yaml")
    assert read_export(tmp_path / "yaml").architecture == made.trained
    assert load_architecture(tmp_path / "yaml" / "architecture.yaml").folded
    fold = made.facts.fold
    assert (fold.passes, fold.tokens, fold.check["positions"]) == (True, "validation", 4096)
    files = {path.name for path in export.write_export(made, tmp_path / "mpc", "mpc")}
    own = {"architecture.yaml", "weights.safetensors", "graph.json", "export.yaml"}
    assert files == own | {"README.md", "checksums.json"}
    pytest.importorskip("transformers")
    files = {path.name for path in export.write_export(made, tmp_path / "hf", "hf")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "huggingface_model.py", "README.md"} <= files
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "The check of the folded form on validation tokens holds." in card


def test_a_folded_export_says_what_was_measured(finished, tmp_path, monkeypatch, capsys):
    folder, _ = finished
    export.export(str(folder), pick="best", fold=True, output_dir=str(tmp_path / "out"))
    printed = capsys.readouterr().out
    assert " becomes " in printed
    assert re.search(r"on 4,096 validation tokens its logits move by \d\.\de[+-]0\d of the largest", printed)
    assert "agrees on 100.00%" in printed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    export.export(str(folder), pick="best", fold=True, output_dir=str(tmp_path / "again"))
    assert "on 4,096 random tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("args", "message"), refusals("refused_by_search.txt", __file__))
def test_bad_input_is_one_clear_line_and_nothing_written(args, message, finished, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished[0], "emptied")
    Path("emptied", ledger.FILE_NAME).write_text("")
    if args.startswith(SMALL):
        args += " --space tiny --seq-len 32 --scale smoke"
        args += "" if "--data" in args else f" --data {root / 'corpus'}"
    assert search.main(args.split()) == (3 if "the cheapest" in message else 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["emptied"]
    assert Path("emptied", ledger.FILE_NAME).read_text() == ""


def test_an_unpriced_default_protocol_names_the_whole_command(tmp_path, capsys):
    (tmp_path / "space.yaml").write_text("name: one\nbase: smollm2-135m\nmembers: [30xMSMWo]\n")
    args = ["--budget-latency", "5min", "--space", str(tmp_path / "space.yaml")]
    assert search.main(args) == 2
    assert capsys.readouterr().err.endswith(f"python -m nas.search {' '.join(args)} --protocol semi2k\n")
    assert search.main([*args, "--protocol", "published"]) == 2
    assert "For example" not in capsys.readouterr().err


def test_a_dry_run_writes_nothing_and_loads_neither_torch_nor_ray(tmp_path):
    code = (
        "import sys; from nas.search import main; "
        "code = main(['--budget-latency', '5min', '--dry-run']); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'ray', 'matplotlib', 'scipy')))"
    )
    assert "1.6e30 members" in python("-c", code, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
