import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from costmodel.errors import UserError
from nas import train
from nas.conversion.parent import load_initial
from nas.conversion.pretrained import read_export, write_checksums, write_pretrained
from nas.corpus.corpus import prepare, tokenizer_folder
from nas.corpus.tokenizer import kept_tokenizer
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from nas.training.manifest import read_training
from search_spaces.architecture import dump_architecture
from search_spaces.bases import Dimensions, base_architecture
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
def gpt2(tmp_path: Path, source_files: str) -> Path:
    """A small GPT-2 as transformers saves it, with a tokenizer of 300 tokens."""
    from nas.conversion.huggingface import save_model

    weights = deployed_weights(build(TINY, torch.Generator().manual_seed(0)))
    save_model(TINY, weights, Path(prepare(source_files, vocab_size=300).folder), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_a_tokenizer_ends_documents_as_before_wherever_it_is_kept(gpt2, tmp_path, source_files) -> None:
    """Llama's and Mistral's end them by </s>, and have no <|endoftext|>."""
    from nas.conversion.huggingface import save_model

    for path in gpt2.glob("tokenizer*.json"):
        path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    model = load_initial(str(gpt2))
    assert model.tokenizer is not None
    write_pretrained(model, tmp_path / "export")
    assert read_export(tmp_path / "export").tokenizer == replace(model.tokenizer, name="bpe")
    corpus = prepare(source_files, vocab_size=300, tokenizer=model.tokenizer)
    assert kept_tokenizer(Path(corpus.folder), model.tokenizer.name) == model.tokenizer
    save_model(TINY, model.weights, Path(corpus.folder), tmp_path / "again")
    again = load_initial(str(tmp_path / "again")).tokenizer
    assert again == replace(model.tokenizer, name="again")
    ends = {
        json.loads((tmp_path / "again" / name).read_text())["eos_token_id"]
        for name in ("config.json", "generation_config.json")
    }
    assert ends == {Tokenizer.from_str(model.tokenizer.json).token_to_id("</s>")}


@pytest.mark.parametrize("text", ["", "{}", '{"eos_token": {}}', '{"eos_token": 3}'])
def test_a_damaged_configuration_of_a_tokenizer_is_refused(text: str, gpt2: Path) -> None:
    (gpt2 / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer_config.json must name the `eos_token` of tokenizer.json beside it"):
        kept_tokenizer(gpt2, "any")


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


@pytest.mark.needs_hf
def test_an_export_for_transformers_is_checked_and_read(gpt2: Path) -> None:
    write_checksums(gpt2)
    weights = deployed_weights(build(TINY, torch.Generator().manual_seed(0)))
    assert load_initial(str(gpt2)).weights["embed.weight"].equal(weights["embed.weight"])
    (gpt2 / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json must be as it was written"):
        load_initial(str(gpt2))


@pytest.mark.needs_hf
@pytest.mark.parametrize(
    "args",
    [
        "SM+ScFuFFN --init-from {gpt2} --scale smoke --tokens 512",
        "1xlSlRo-1xooooo --parent {gpt2} --base tiny --scale paper --seq-len 16 --tokens 1024 "
        "--recipe.scale.batch 4 --recipe.scale.micro-batch 4",
    ],
)
def test_a_gpt2_is_fine_tuned_with_fewer_nonlinearities(args: str, gpt2, tmp_path, source_files) -> None:
    """Its tokenizer goes with it; FFNs start as products of its linears, or it is the parent at its own size."""
    out = tmp_path / "out"
    flags = args.format(gpt2=gpt2).split()
    assert train.main([*flags, "--data", source_files, "--output-dir", str(out)]) == 0
    made = read_training(out).candidate
    assert (made.architecture.vocab_size, made.architecture.context) == (300, 32)
    assert (made.recipe.distillation is not None) == ("--parent" in args)
    assert made.recipe.distillation is None or made.recipe.distillation.placement == "2xLSLGo"


def test_weights_without_their_tokenizer_are_refused_and_with_it_are_trained(tmp_path, source_files, capsys) -> None:
    """A tokenizer trained on the corpus would have as many tokens as the weights know, and other ones."""
    folder = write_export(tmp_path / "export")
    args = ["SM", "--init-from", str(folder), "--scale", "smoke", "--tokens", "512", "--data", source_files]
    assert train.main([*args, "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "but is in those of bpe-" in error
    assert "put the tokenizer.json of the weights beside them" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    tokenizer = tokenizer_folder(prepare(source_files, vocab_size=300).fingerprint) / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    assert train.main([*args, "--output-dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
