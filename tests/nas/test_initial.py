"""A training that starts from weights: of an export of ours, and of a folder of transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nas import train
from nas.initial import load_initial, read_export
from nas.model import build
from nas.weights import deployed_weights
from search_spaces.architecture import dump_architecture
from search_spaces.decoder import Dimensions, base_architecture
from search_spaces.notation import parse

TINY = base_architecture("tiny", Dimensions(vocab=300, context=32))


def write_export(folder: Path, name: str = "SM+LN+G", **changes: torch.Tensor) -> Path:
    model = build(parse(name, TINY).architecture, torch.Generator().manual_seed(0))
    folder.mkdir()
    weights = {key: value.clone() for key, value in deployed_weights(model).items()} | changes
    save_file(weights, folder / "weights.safetensors")
    (folder / "trained.yaml").write_text(dump_architecture(model.architecture))
    return folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(30):
        (folder / f"m{index}.py").write_text(f"def f{index}(a, b):\n    return a * {index} + b\n" * 40)
    return str(folder)


def test_an_export_is_read_back(tmp_path: Path) -> None:
    source = load_initial(str(write_export(tmp_path / "export")))
    assert source.architecture == TINY
    assert set(source.weights) == set(deployed_weights(build(TINY, torch.Generator())))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"embed.weight": torch.zeros(5, 16)}, "must hold 'embed.weight' of shape .300, 16., .* but has .5, 16."),
        ({"embed.weight": torch.full((300, 16), torch.nan)}, "finite floating-point numbers, but 'embed.weight'"),
        ({"embed.weight": torch.zeros(300, 16, dtype=torch.int8)}, "finite floating-point numbers"),
    ],
)
def test_a_damaged_export_is_refused(tmp_path: Path, weights: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_export(write_export(tmp_path / "export", **weights))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="weights.safetensors must be the weights of trained.yaml beside it"):
        read_export(folder)


def test_a_gpt2_is_linearised_and_fine_tuned(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer goes with it, and the FFNs start as products of its linears."""
    pytest.importorskip("transformers")
    from nas.data import prepare
    from nas.huggingface import save_model

    model = build(TINY, torch.Generator().manual_seed(0))
    prepared = prepare(corpus, vocab_size=300)
    save_model(TINY, deployed_weights(model), Path(prepared.folder, "tokenizer.json"), tmp_path / "gpt2")
    args = ["SM+ScFuFFN", "--init-from", str(tmp_path / "gpt2"), "--scale", "smoke", "--tokens", "512"]
    assert train.main([*args, "--data", corpus, "--output-dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "training SM+ScFuFFN at width 16" in capsys.readouterr().out


def test_tokens_that_the_weights_do_not_know_are_refused(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(corpus) / "odd.py").write_text("xyz\n" * 9)
    folder = write_export(tmp_path / "export", name="SM_i2")
    text = (folder / "trained.yaml").read_text()
    (folder / "trained.yaml").write_text(text.replace("vocab_size: 300", "vocab_size: 4000"))
    weights = deployed_weights(build(parse("SM_i2", TINY).architecture, torch.Generator().manual_seed(0)))
    weights |= {name: torch.zeros(4000, 16) for name in ("embed.weight", "logits.weight")}
    save_file({name: value.clone() for name, value in weights.items()}, folder / "weights.safetensors")
    args = ["SM_i2", "--init-from", str(folder), "--scale", "smoke", "--data", corpus]
    assert train.main([*args, "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "a vocabulary of 4000, but is in those of bpe-" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
