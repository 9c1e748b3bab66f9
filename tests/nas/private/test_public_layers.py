"""Whose weights may be public: those that are a checkpoint's, bit for bit."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.execution import interpreter
from nas.conversion.fold import fold
from nas.conversion.stream_scale import with_stream_scale
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.private.model import PrivateModel, load_model
from nas.private.public_layers import require_public
from nas.private.setup import asked_setup
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse


def test_weights_must_be_those_of_the_checkpoint(export):
    checkpoint = load_model(str(export), "knee")
    assert checkpoint.weights is not None
    name = "layers.0.ffn.up.weight"
    changed = checkpoint.weights[name].copy()
    changed[0, 0] = np.nextafter(changed[0, 0], np.inf)
    tuned = replace(checkpoint, weights={**checkpoint.weights, name: changed})
    require_public(tuned, "embed,head", None, checkpoint)
    require_public(tuned, None, 0, checkpoint)
    with pytest.raises(ValueError, match=f"but '{name}' differs .*; leave layer 0 out, or give the checkpoint that"):
        require_public(tuned, "embed,0", None, checkpoint)
    with pytest.raises(ValueError, match=f"but '{name}' differs .*; leave layer 0 out"):
        require_public(tuned, None, 1, checkpoint)
    missing = replace(checkpoint, weights={key: value for key, value in tuned.weights.items() if key != name})
    with pytest.raises(ValueError, match=f"but '{name}' is not in it .*; leave layer 0 out"):
        require_public(tuned, "0", None, missing)


@pytest.fixture
def llama(tokenizer):
    """`llama(factor)`: folded, with its stream times that."""
    base = base_architecture("smollm2-135m", Dimensions(layers=2, heads=2, kv_heads=1, d_model=16, d_ff=24, vocab=280))
    architecture = parse("SM+RMS+SwiGLU", base).architecture
    torch.manual_seed(0)
    weights = deployed_weights(Decoder(architecture))

    def made(factor: float) -> PrivateModel:
        folded = fold(*with_stream_scale(architecture, weights, factor))
        arrays = {name: value.double().numpy() for name, value in folded.weights.items()}
        return PrivateModel(
            name="llama", architecture=folded.architecture, weights=arrays, tokenizer=tokenizer, corpus=None
        )

    return made


def test_streams_of_both_may_differ_by_a_power_of_two(llama):
    whole, half = llama(1.0), llama(0.5)
    require_public(half, "embed,0-1,head", 1, whole)
    logits = [interpreter.execute(lower(model.architecture, 8), model.weights, np.arange(8)) for model in (whole, half)]
    assert logits[0] == pytest.approx(logits[1], abs=1e-12)
    mixed = replace(half, weights=half.weights | {"embed.weight": whole.weights["embed.weight"]})
    with pytest.raises(ValueError, match=r"'embed.weight' differs"):
        require_public(mixed, "embed", None, whole)
    third = replace(half, architecture=replace(half.architecture, norm_epsilon=whole.architecture.norm_epsilon / 9))
    with pytest.raises(ValueError, match=r"by a power of two, .*, but does by 0.333333 .llama.; give the checkpoint"):
        require_public(third, "0", None, whole)


def test_a_client_without_weights_runs_layers_of_the_same_stream_and_shapes(llama):
    whole, half = llama(1.0), replace(llama(0.5), weights=None)
    with pytest.raises(ValueError, match=r"not at all at a party without weights, but does by 0.5 .*, or the export"):
        require_public(half, None, 1, whole)
    here = replace(whole, weights=None)
    require_public(here, "embed,0", 1, whole)
    name = "layers.0.ffn.up.weight"
    with pytest.raises(ValueError, match=f"but '{name}' differs"):
        require_public(here, None, 1, replace(whole, weights=whole.weights | {name: whole.weights[name][1:]}))
    others = {key: value for key, value in whole.weights.items() if key != name}
    with pytest.raises(ValueError, match=f"but '{name}' is not in it"):
        require_public(here, None, 1, replace(whole, weights=others))


def test_a_party_opens_the_checkpoint_if_it_compares_or_computes(export, tmp_path):
    here = shutil.copytree(export, tmp_path / "copy")
    (here / "weights.safetensors").unlink()
    for party, layers, is_opened in ((0, "client", True), (0, "public", False), (2, "client", False)):
        given = {"client_layers": 0} if layers == "client" else {"public_layers": "0"}
        setup = asked_setup(str(here), "knee", party=party, public_checkpoint=str(export), **given)
        assert (setup.client_weights is not None) == is_opened


def test_layers_and_checkpoint_go_together(export):
    for given in ({"public_layers": "0"}, {"client_layers": 0}, {"public_checkpoint": str(export)}):
        with pytest.raises(ValueError, match="--public-checkpoint goes with .*; give both, or none"):
            asked_setup(str(export), "knee", party=None, **given)
