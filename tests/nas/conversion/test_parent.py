import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from costmodel.config.files import load_mapping
from costmodel.errors import UserError
from nas import train
from nas.conversion.parent import (
    BUILTIN,
    BUILTIN_FOLDER,
    Parent,
    kept_parent,
    load_initial,
    load_parent,
    require_fit,
)
from nas.conversion.pretrained import TRAINED_FILE, read_export, write_checksums, write_pretrained
from nas.corpus import local_files
from nas.corpus.corpus import Corpus, prepare, tokenizer_folder
from nas.corpus.documents import by_hash
from nas.corpus.ngrams import ngram_baseline
from nas.corpus.tokenizer import kept_tokenizer
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, Recipe, from_parent, trained_architecture
from nas.training.batches import validate
from nas.training.manifest import read_training
from search_spaces.architecture import dump_architecture
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import parse

PROXY = SCALES["proxy"]


@pytest.fixture(scope="module")
def builtin() -> Parent:
    return load_parent(BUILTIN)


def test_the_builtin_parent_is_small_and_is_what_the_default_space_starts_from(builtin: Parent) -> None:
    assert sum(path.stat().st_size for path in BUILTIN_FOLDER.iterdir()) < 8e6
    assert builtin.distillation.placement == "12xLSLGo"
    linears = [layer.weight for layer in builtin.decoder().layers.modules() if isinstance(layer, torch.nn.Linear)]
    squares = torch.cat([weight.flatten() for weight in linears]).square()
    assert builtin.distillation.weight_rms == pytest.approx(squares.mean().sqrt().item(), rel=1e-5)
    require_fit(builtin, trained_architecture(BASES["gpt2-small"], PROXY))


@pytest.fixture
def held_out_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library is its held-out files, whole, and of the others a package that is trained on."""

    def listed(folder: Path) -> Iterator[Path]:
        for path in stdlib_files(folder):
            name = path.relative_to(folder).as_posix()
            if by_hash(name) == "validation" or name.startswith("email/"):
                yield path

    stdlib_files = local_files.stdlib_files
    monkeypatch.setattr(local_files, "stdlib_files", listed)


def perplexity_of(parent: Parent, corpus: Corpus, tokens: int = PROXY.validation_tokens) -> float:
    return math.exp(validate(parent.decoder(), corpus, replace(PROXY, validation_tokens=tokens)).loss)


@pytest.mark.usefixtures("held_out_files")
def test_the_builtin_parent_has_the_perplexity_it_says(builtin: Parent) -> None:
    """On whatever Python runs this, whose files differ a little from those that it was trained on."""
    corpus = prepare("stdlib", 512, tokenizer=builtin.model.tokenizer)
    stated = load_mapping(BUILTIN_FOLDER / "export.yaml")["result"]["perplexity"]
    assert perplexity_of(builtin, corpus, 16_384) == pytest.approx(stated, rel=0.1)  # stated of the whole split


@pytest.mark.slow
def test_the_builtin_parent_predicts_better_than_any_n_gram(builtin: Parent) -> None:
    corpus = prepare("stdlib", 512, tokenizer=builtin.model.tokenizer)
    ngrams = ngram_baseline(corpus, seq_len=PROXY.seq_len, validation_tokens=PROXY.validation_tokens)
    assert perplexity_of(builtin, corpus) < ngrams.perplexity(5)


def test_training_starts_with_the_predictions_of_the_parent(builtin: Parent, some_tokens, source_files: str) -> None:
    corpus = prepare(source_files, vocab_size=512, tokenizer=builtin.model.tokenizer)
    recipe = from_parent(Recipe(scale=PROXY), builtin.distillation)
    made = Candidate(architecture=parse("6xoSoGo-6xooooo", BASES["gpt2-small"]).architecture, recipe=recipe)
    begun = Decoder(made.initial_architecture)
    load_deployed(begun, builtin.start(made, corpus))
    tokens = some_tokens(512)
    torch.testing.assert_close(begun(tokens).logits, builtin.decoder()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_kept_parent_is_the_parent(builtin: Parent, tmp_path: Path) -> None:
    write_pretrained(builtin.model, tmp_path / "parent")
    assert kept_parent(tmp_path / "parent", BUILTIN, builtin.digest).digest == builtin.digest
    assert load_parent(str(tmp_path / "parent")).digest == builtin.digest
    with pytest.raises(UserError, match=r"must hold the parent 000000000000 of the run, but holds \w+; start a new"):
        kept_parent(tmp_path / "parent", BUILTIN, "0" * 12)


@pytest.mark.parametrize("name", [TRAINED_FILE, "weights.safetensors", "tokenizer.json"])
def test_a_folder_that_lost_a_file_or_was_edited_is_refused(builtin: Parent, tmp_path: Path, name: str) -> None:
    write_pretrained(builtin.model, tmp_path)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw + b" ")
    with pytest.raises(UserError, match=rf"{name} must be as it was written \(SHA-256 \w+\), but is \w+; restore it"):
        load_parent(str(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match="but is gone; restore it"):
        load_parent(str(tmp_path))


def test_what_is_no_parent_is_refused(builtin: Parent, tmp_path: Path) -> None:
    folded = builtin.model._replace(architecture=replace(builtin.model.architecture, folded=True))
    with pytest.raises(UserError, match="must be a model as it was trained, but is a folded one"):
        _ = Parent("p", folded, builtin.digest).distillation
    write_pretrained(builtin.model._replace(tokenizer=None), tmp_path)
    with pytest.raises(UserError, match=r"must come with its tokenizer; put its tokenizer\.json beside the weights"):
        load_parent(str(tmp_path))
    (tmp_path / "checksums.json").write_text("[1")
    with pytest.raises(UserError, match="must hold the SHA-256 of the files beside it"):
        load_parent(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"d_model": 48, "d_ff": 192}, "`d_model` that candidates are trained with, 48, but has 96"),
        ({"num_heads": 6}, "`num_heads` that candidates are trained with, 6, but has 12"),
        ({"vocab_size": 300}, "`vocab_size` that candidates are trained with, 300, but has 512"),
        ({"block": "pythia"}, "`block` that candidates are trained with, 'pythia', but has 'gpt2'"),
        (
            {"context": 256},
            r"training sequences \(--seq-len, in a search --train-len\) must be at most the context of parent "
            "'builtin', 128, but got 256",
        ),
    ],
)
def test_a_parent_of_other_dimensions_is_refused(builtin: Parent, change: dict[str, int], named: str) -> None:
    target = replace(builtin.model.architecture, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        require_fit(builtin, target)


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


def test_an_export_is_read_back_and_missing_weights_are_named(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    source = load_initial(str(folder))
    assert source.architecture == TINY
    assert set(source.weights) == set(deployed_weights(build(TINY, torch.Generator())))
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="weights.safetensors cannot be read: No such file"):
        read_export(folder)


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
    assert "must come with its tokenizer; put its tokenizer.json beside the weights" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    tokenizer = tokenizer_folder(prepare(source_files, vocab_size=300).fingerprint) / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    assert train.main([*args, "--output-dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
