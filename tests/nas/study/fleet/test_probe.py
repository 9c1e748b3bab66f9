from dataclasses import replace

import pytest

from nas.study.fleet.probe import probe_file, problem, question, source_digest
from nas.study.run_folder import CONFIG_FILE


@pytest.fixture
def asked(corpus, tmp_path):
    (tmp_path / CONFIG_FILE).write_text("seed: 0\n")
    return question(tmp_path, corpus, "cpu")


def test_a_node_that_has_everything_leaves_a_file(asked):
    assert problem(asked, "n1") is None
    assert probe_file(asked.folder, "n1").read_text() == "n1"


def test_what_a_node_lacks_is_said(asked, tmp_path):
    assert "its copy of this package is another one" in problem(replace(asked, sources="0" * 12), "n1")
    assert problem(replace(asked, versions={"torch": "1.0"}), "n1").startswith("it has torch 2.")
    elsewhere = replace(asked, folder=tmp_path / "no")
    assert problem(elsewhere, "n1") == (
        f"run folder {tmp_path / 'no'} cannot be read and written there: No such file or directory"
    )
    gone = replace(asked, corpus=replace(asked.corpus, folder=str(tmp_path)))
    assert f"corpus {tmp_path} is not there: [Errno 2] No such file" in problem(gone, "n1")


def test_a_corpus_that_is_cut_off_is_not_there(asked):
    longer = replace(asked, corpus=replace(asked.corpus, num_train_tokens=asked.corpus.num_train_tokens * 2))
    assert f"corpus {asked.corpus.folder} is not there: mmap length is greater" in problem(longer, "n1")


def test_a_gpu_that_is_not_there_is_said(asked, monkeypatch):
    monkeypatch.setattr("torch.ones", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("No CUDA\nGPUs")))
    assert problem(replace(asked, device="cuda"), "n1") == "its GPU does not compute: No CUDA GPUs"


def test_the_digest_is_of_the_code():
    assert len(source_digest()) == 12
