"""Private answers of a small model and a cheaper one, on the CPU."""

import pytest
import torch

from experiments.private_gpu import figures
from nas.conversion.pretrained import Pretrained, write_pretrained
from nas.corpus.documents import GivenTokenizer
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import END_OF_TEXT, train_tokenizer
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse
from tests.conftest import write_text


@pytest.mark.needs_crypten
def test_the_figures_are_those_of_both_models(tmp_path):
    tokenizer = GivenTokenizer(
        name="bpe", json=train_tokenizer(open_source(str(write_text(tmp_path / "a.txt"))), 280), end_of_text=END_OF_TEXT
    )
    base = base_architecture("smollm2-135m", Dimensions(layers=1, heads=2, kv_heads=1, d_model=16, d_ff=24, vocab=280))
    architecture = parse("SM+RMS+SwiGLU", base).architecture
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in deployed_weights(Decoder(architecture)).items()}
    write_pretrained(Pretrained(architecture, weights, tokenizer), tmp_path / "model")
    first, *rows = figures(str(tmp_path / "model"), "1xMSMQo", "cpu", prompt_tokens=5, new_tokens=2)
    assert first == ("fraction", 16, "bits")
    for name in ("parent", "member"):
        assert (f"{name}, sent over predicted", 1, "") in rows
        assert [unit for row, _, unit in rows if row == f"{name}, prompt of 5"] == ["s", "B"]
    assert ("parent, tokens of 2 equal to the clear", 2, "") in rows
