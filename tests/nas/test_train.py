import math
import os
import shutil
import signal

import pytest
import torch

from costmodel.config.files import load_mapping
from costmodel.errors import UserError
from nas import export, train
from nas.conversion.pretrained import read_export
from nas.conversion.verified_fold import LOG_SUMS
from nas.corpus.corpus import known_corpus
from nas.export import training_export
from nas.model.decoder import build
from nas.model.weights import load_deployed, load_stored
from nas.provenance import SCHEMA_VERSION
from nas.training import checkpoint, trainer
from nas.training.batches import train_batch
from nas.training.manifest import TRAINING_FILE, read_training
from nas.training.objective import Objective
from tests.conftest import refusals

SMOKE = ("--base", "tiny", "--scale", "smoke", "--seq-len", "16", "--tokens", "1024")


def test_trains_and_resumes_to_the_same_end(source_files, tmp_path, capsys):
    folder = tmp_path / "out"
    arguments = ["EReg(SM(t)+ScFuFFN)", *SMOKE, "--parent", "none", "--data", source_files, "--output-dir"]
    assert train.main([*arguments, str(folder)]) == 0
    first = capsys.readouterr().out
    validations = [line for line in first.splitlines() if "validation perplexity" in line]
    assert [line.split(",")[0].split(" tokens")[0] for line in validations[:-1]] == ["256", "512"]
    held = known_corpus(read_training(folder).corpus).lengths["validation"]
    assert held < 2048  # which the scale asks for
    assert all(f" on 512 of {held:,} tokens, " in line for line in validations[:-1])
    assert validations[-1].startswith("1,024 tokens: validation perplexity")
    assert " of " not in validations[-1]
    assert (folder / "metrics.csv").exists()
    assert train.main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert last_lines(first) == last_lines(capsys.readouterr().out)
    ngrams = read_training(folder).ngrams
    assert ngrams.tokens == 1024
    assert f"training tokens: unigram {ngrams.perplexity(1):.4g}, " in first
    assert train.main(["SM", *SMOKE, "--data", source_files, "--output-dir", str(folder)]) == 2
    assert "already holds a training" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="must have a whole checkpoint, but has none"):
        export.export(str(folder))
    assert train.main(["SM", *SMOKE, "--data", source_files, "--output-dir", str(tmp_path)]) == 2
    assert "must be new or empty" in capsys.readouterr().err


def last_lines(printed):
    """The last perplexity, the n-grams after it, and whether it is above the trigram."""
    lines = printed.splitlines()
    (place,) = (index for index, line in enumerate(lines) if line.startswith("n-gram baselines, perplexity after"))
    return lines[place - 1 : -1]


def test_ctrl_c_saves_and_the_training_goes_on(source_files, tmp_path, capsys, monkeypatch):
    arguments = ["SM", *SMOKE, "--data", source_files, "--output-dir"]
    assert train.main([*arguments, str(tmp_path / "whole")]) == 0
    whole, *_ = last_lines(capsys.readouterr().out)[0].split(", ")
    original = train_batch

    def press(corpus, *, step, **rest):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(corpus, step=step, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_batch", press)
        assert train.main([*arguments, str(tmp_path / "out")]) == 130
    assert f"continue with --resume {tmp_path / 'out'}" in capsys.readouterr().out
    assert checkpoint.load_latest(tmp_path / "out").step == 3
    assert training_export(tmp_path / "out").facts.result.ngrams is None  # they are of all tokens
    assert train.main(["--resume", str(tmp_path / "out")]) == 0
    assert last_lines(capsys.readouterr().out)[0].startswith(f"{whole}, ")


@pytest.mark.parametrize(("args", "message"), refusals("refused_by_train.txt", __file__))
def test_bad_input_is_one_clear_line_and_nothing_written(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert train.main(args.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_was_trained_is_exported_and_trained_on(source_files, tmp_path, capsys):
    folder, out = tmp_path / "run", tmp_path / "out"
    arguments = ["EReg(SM+LN+R)", *SMOKE, "--data", source_files]
    assert train.main([*arguments, "--normalisation", "spectral", "--output-dir", str(folder)]) == 0
    export.export(str(folder), output_dir=str(out))
    facts = load_mapping(out / "export.yaml")
    assert (facts["notation"], facts["result"]["tokens"]) == ("EReg(SM+LN+R)", 1024)
    assert facts["result"]["perplexity"] == pytest.approx(math.exp(facts["result"]["val_loss"]))
    above = facts["result"]["perplexity"] > facts["result"]["ngram_floors"]["perplexities"]["trigram"]
    assert facts["result"]["knows_less_than_trigram"] == above
    assert ("EReg(SM+LN+R) is worse than a trigram model\n" in capsys.readouterr().out) == above
    assert facts["cost"]["protocol"] == "published"
    read_back = read_export(out)
    tokens = torch.arange(8).unsqueeze(0)
    trained = read_training(folder).candidate
    model = Objective(trained, torch.Generator()).model.eval()
    load_stored(model, checkpoint.load_latest(folder).weights)
    deployed = build(read_back.architecture, torch.Generator())
    load_deployed(deployed, read_back.weights)
    torch.testing.assert_close(deployed(tokens).logits, model(tokens).logits)
    more = ["EReg(SM+LN+R)", *SMOKE[2:], "--data", source_files, "--init-from", str(out)]
    assert train.main([*more, "--output-dir", str(tmp_path / "more")]) == 0
    assert read_training(tmp_path / "more").ngrams.tokens > 10 * 1024  # given weights may have seen all
    for name, share in (("SM+LN+R", 0.0), ("SM+LN", 0.95)):  # what the parent is itself has nobody to learn from
        again = [name, *SMOKE, "--data", source_files, "--parent", str(out), "--output-dir", str(tmp_path / name)]
        assert train.main(again) == 0
        assert read_training(tmp_path / name).candidate.recipe.distillation.prediction_weight == share
    learned = ["SM+LN", *SMOKE, "--data", source_files, "--parent", str(out), "--init-from", str(tmp_path / "SM+LN")]
    assert train.main([*learned, "--recipe.scale.learning-rate", "1e-12", "--output-dir", str(tmp_path / "on")]) == 0
    ends = [(tmp_path / name / "metrics.csv").read_text().rsplit(",", 1)[1] for name in ("SM+LN", "on")]
    assert float(ends[1]) == pytest.approx(float(ends[0]), rel=1e-6)
    resumed, text = tmp_path / "on" / "train.yaml", (tmp_path / "on" / "train.yaml").read_text()
    assert train.main(["--resume", str(resumed.parent)]) == 0
    resumed.write_text(text.replace(str(tmp_path / "SM+LN"), str(folder)))
    assert train.main(["--resume", str(resumed.parent)]) == 2
    assert f"--init-from {folder} of {resumed.parent} must be the model" in capsys.readouterr().err
    (tmp_path / "text").mkdir()
    for number in range(30):
        words = " ".join(f"{number}th text, with a tokenizer of its own {at * number}" for at in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    apart = ["SM+LN", *SMOKE, "--data", str(tmp_path / "text"), "--parent", "none"]
    assert train.main([*apart, "--output-dir", str(tmp_path / "apart")]) == 0
    assert train.main([*learned[:-1], str(tmp_path / "apart"), "--output-dir", str(tmp_path / "removed")]) == 2
    assert "must have the tokenizer of --parent" in capsys.readouterr().err
    assert train.main(["1xLSLRo-1xooLRo", *learned[1:], "--output-dir", str(tmp_path / "removed")]) == 2
    assert "--init-from beside --parent must start an architecture that keeps all" in capsys.readouterr().err
    assert not (tmp_path / "removed").exists()
    export.export(str(folder), fold=True, format="mpc")
    assert (folder / "exports" / f"{facts['arch_id']}-folded-mpc" / "graph.json").exists()


def test_attention_that_leaves_fixed_point_is_named_at_the_end(source_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nas.conversion.score_bounds.LOG_SUMS", LOG_SUMS | {"power8": (0.0, 0.0)})
    arguments = ["1xLPLRo-1xLSLRo", *SMOKE, "--parent", "none", "--data", source_files]
    assert train.main([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in fixed point: ")]
    assert len(said) == 1
    assert "layers.0.attention: sums of its rows of eighth powers are up to e^" in said[0]


def test_a_training_of_another_version_is_refused_in_a_line(tmp_path):
    (tmp_path / TRAINING_FILE).write_text("seed: 0\nfloors: null\n")
    with pytest.raises(UserError, match=f"`schema_version` must be {SCHEMA_VERSION}, but got None; it was written by"):
        read_training(tmp_path)
