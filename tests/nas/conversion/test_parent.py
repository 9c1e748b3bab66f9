import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, BUILTIN_FOLDER, Parent, keep_parent, kept_parent, load_parent, require_fit
from nas.conversion.pretrained import TRAINED_FILE
from nas.corpus import local_files
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.documents import by_hash
from nas.corpus.ngram_baseline import ngram_baseline
from nas.model.decoder import Decoder
from nas.model.weights import load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, Recipe, from_parent, trained_architecture
from nas.training.batches import validate
from search_spaces.bases import BASES
from search_spaces.notation import parse

PROXY = SCALES["proxy"]


@pytest.fixture(scope="module")
def builtin() -> Parent:
    return load_parent(BUILTIN)


def test_the_builtin_parent_is_small_and_is_what_the_default_space_starts_from(builtin: Parent) -> None:
    assert sum(path.stat().st_size for path in BUILTIN_FOLDER.iterdir()) < 8e6
    assert builtin.distillation.placement == "12xLSLGo"
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


def perplexity_of(parent: Parent, corpus: Corpus) -> float:
    return math.exp(validate(parent.decoder(), corpus, PROXY).loss)


@pytest.mark.usefixtures("held_out_files")
def test_the_builtin_parent_has_the_perplexity_it_says(builtin: Parent) -> None:
    """On whatever Python runs this, whose files differ a little from those that it was trained on."""
    corpus = prepare("stdlib", 512, tokenizer=builtin.model.tokenizer)
    stated = load_mapping(BUILTIN_FOLDER / "export.yaml")["result"]["perplexity"]
    assert perplexity_of(builtin, corpus) == pytest.approx(stated, rel=0.1)  # stated of the whole split


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
    keep_parent(builtin, tmp_path / "parent")
    assert kept_parent(tmp_path / "parent", BUILTIN, builtin.digest).digest == builtin.digest
    assert load_parent(str(tmp_path / "parent")).digest == builtin.digest
    with pytest.raises(
        UserError, match=r"must hold the parent 000000000000 of the run, but holds \w+; start a new run"
    ):
        kept_parent(tmp_path / "parent", BUILTIN, "0" * 12)


@pytest.mark.parametrize("name", [TRAINED_FILE, "weights.safetensors", "tokenizer.json"])
def test_a_folder_that_lost_a_file_or_was_edited_is_refused(builtin: Parent, tmp_path: Path, name: str) -> None:
    keep_parent(builtin, tmp_path)
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
    keep_parent(Parent("p", builtin.model._replace(tokenizer=None), builtin.digest), tmp_path)
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
        ({"context": 256}, "--seq-len must be at most the context of parent 'builtin', 128, but got 256"),
    ],
)
def test_a_parent_of_other_dimensions_is_refused(builtin: Parent, change: dict[str, int], named: str) -> None:
    target = replace(builtin.model.architecture, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        require_fit(builtin, target)
