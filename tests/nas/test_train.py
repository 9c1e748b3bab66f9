import pytest

from nas import train

SMOKE = ("--base", "tiny", "--scale", "smoke", "--seq-len", "16", "--tokens", "1024")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(30):
        (folder / f"m{index}.py").write_text(f"def f{index}(a, b):\n    return a * {index} + b\n" * 40)
    return str(folder)


def test_trains_and_resumes_to_the_same_end(corpus, tmp_path, capsys):
    folder = tmp_path / "out"
    assert train.main(["EReg(SM(t)+ScFuFFN)", *SMOKE, "--data", corpus, "--output-dir", str(folder)]) == 0
    first = capsys.readouterr().out
    assert "1,024 tokens: validation perplexity" in first
    assert (folder / "metrics.csv").exists()
    assert train.main(["--resume", str(folder)]) == 0
    assert first.splitlines()[-2] == capsys.readouterr().out.splitlines()[-2]
    assert train.main(["SM", *SMOKE, "--data", corpus, "--output-dir", str(folder)]) == 2
    assert "already holds a training" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("a search")
    assert train.main(["SM", *SMOKE, "--data", corpus, "--output-dir", str(folder)]) == 2
    assert "must be new or empty" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "an architecture is required"),
        ("SM+FOO", "architecture must be a name like"),
        ("SM+LN+G --base moon", "base must be one of"),
        ("SM+ScFuFFN_i30", "removes more FFNs than there are layers"),
        ("nowhere.yaml", "does not exist"),
        ("SM --tokens 0", "`tokens` of a scale must be at least 1"),
        ("SM --device cuda", "--device cuda needs a CUDA device"),
        ("SM --seq-len 4096", "the context must cover a sequence"),
        ("SM --seed 99999999999999999999", "--seed must be from 0 to"),
        ("sys:exit", "but it raised SystemExit"),
        ("SM --data /no/such/path", "/no/such/path"),
        ("SM --resume x", "--resume DIR takes everything from DIR"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_written(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert train.main(args.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
