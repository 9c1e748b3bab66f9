"""Whose weights may be public: those that are a checkpoint's, bit for bit."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from nas.private.model import load_model
from nas.private.public_layers import require_public
from nas.private.setup import asked_setup


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


def test_streams_of_both_may_differ_by_a_power_of_two(export):
    checkpoint = load_model(str(export), "knee")
    assert checkpoint.weights is not None
    halved = replace(checkpoint.architecture, norm_epsilon=checkpoint.architecture.norm_epsilon / 4)
    for factor, agrees in {0.5: True, 0.25: False}.items():
        embed = {"embed.weight": checkpoint.weights["embed.weight"] * factor}
        smaller = replace(checkpoint, architecture=halved, weights=checkpoint.weights | embed)
        with nullcontext() if agrees else pytest.raises(ValueError, match=r"'embed.weight' differs"):
            require_public(smaller, "embed", None, checkpoint)


def test_layers_and_checkpoint_go_together(export):
    for given in ({"public_layers": "0"}, {"client_layers": 0}, {"public_checkpoint": str(export)}):
        with pytest.raises(ValueError, match="--public-checkpoint goes with .*; give both, or none"):
            asked_setup(str(export), "knee", weights_here=True, **given)
