from pathlib import Path

import pytest
import torch

import nas.private.__main__ as main
from nas.conversion.fold import fold
from nas.conversion.pretrained import Pretrained, write_pretrained
from nas.corpus.documents import GivenTokenizer
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import END_OF_TEXT, train_tokenizer
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse
from tests.conftest import write_text

CONTEXT = 24


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> GivenTokenizer:
    """A byte-level one that knows all bytes, and a few merges."""
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    json = train_tokenizer(open_source(str(text)), 280)
    return GivenTokenizer(name="bpe", json=json, end_of_text=END_OF_TEXT)


@pytest.fixture(scope="session")
def export(tmp_path_factory, tokenizer) -> Path:
    """A folded decoder of one layer, as `nas.export --fold` writes it, untrained."""
    base = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=280, context=CONTEXT))
    architecture = parse("SM+LN+R", base).architecture
    torch.manual_seed(0)
    weights = deployed_weights(Decoder(architecture))
    folded = fold(architecture, weights)
    folder = tmp_path_factory.mktemp("export")
    write_pretrained(Pretrained(folded.architecture, folded.weights, tokenizer), folder)
    return folder


@pytest.fixture
def run(capsys):
    """`code, stdout, stderr` of `python -m nas.private` with some arguments."""

    def run_command(*args):
        with pytest.raises(SystemExit) as exit_info:
            main.main(args)
        return exit_info.value.code, *capsys.readouterr()

    return run_command
