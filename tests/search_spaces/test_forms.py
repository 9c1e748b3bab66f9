from typing import get_args

import pytest

from search_spaces.forms import ATTENTIONS, FFNS, INNERS, NORMS, STABILISERS, Attention, Ffn, Inner, Norm, Stabiliser
from tests.conftest import python

ADDED = """
from functools import partial
from costmodel import ops
from search_spaces import forms

forms.FFNS["squareglu"] = forms.FfnForm(
    "Y", "squared-gate FFN", "SquareGLU", ops.Square, is_gated=True, degree=2, replaces=True
)

import numpy as np
import torch
import costmodel
from costmodel.execution import interpreter
from nas.conversion.huggingface import to_transformers
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from nas.report.html.placements import kept_words
from nas.run.folder import own_space
from search_spaces.bases import BASES
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse

architecture = parse("SM+LN+SquareGLU", BASES["tiny"]).architecture
assert parse("2xLSLYo", BASES["tiny"]).architecture == architecture
assert name_of(architecture) == "SM+LN+SquareGLU"
assert "squared-gate FFN in 2" in kept_words(architecture, "unfolded")
assert "squareglu" in {layer.ffn for layer in own_space(parse("SM+RMS+SwiGLU", BASES["tiny"]).architecture).layers}
assert costmodel.price(architecture, protocol="semi2k", seq_len=8).sent_bytes > 0
model = build(architecture, torch.Generator().manual_seed(0))
tokens = torch.arange(8)
weights = deployed_weights(model)
with torch.no_grad():
    logits = model(tokens[None]).logits[0].numpy()
again = interpreter.execute(
    lower(architecture, 8), {name: value.double().numpy() for name, value in weights.items()}, tokens.numpy()
)
np.testing.assert_allclose(again, logits, atol=1e-5)
with torch.no_grad():
    exported = to_transformers(architecture, weights)(tokens[None]).logits[0].numpy()
np.testing.assert_allclose(exported, logits, atol=1e-5)
"""


@pytest.mark.parametrize(
    ("forms", "choices"),
    [(NORMS, Norm), (ATTENTIONS, Attention), (FFNS, Ffn), (STABILISERS, Stabiliser), (INNERS, Inner)],
)
def test_every_choice_has_a_record_and_a_letter_of_its_own(forms, choices) -> None:
    assert sorted(forms) == sorted(get_args(choices))
    letters = [form if isinstance(form, str) else form.letter for form in forms.values()]
    assert len(set(letters)) == len(letters)


@pytest.mark.needs_hf
def test_an_ffn_that_is_added_is_named_priced_built_drawn_and_exported() -> None:
    """In a process of its own, as modules read the records when they are imported."""
    python("-c", ADDED)
