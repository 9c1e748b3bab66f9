from typing import Any

import numpy as np
import pytest
import torch

from costmodel.engine import spu
from costmodel.execution import interpreter
from costmodel.protocols.primitives import EngineSetting
from nas.conversion.fold import fold
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import Recipe
from nas.training.objective import Objective
from search_spaces.architecture import Architecture
from search_spaces.bases import base_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse

SEQ_LEN = 16
LEAST_ERROR = 2e-4  # what fixed point leaves of logits of a few units


def engine_error(architecture: Architecture, weights: dict[str, Any], tokens: Any) -> float:
    """Largest difference of a logit under `semi2k` to the clear one."""
    graph, arrays = lower(architecture, SEQ_LEN), {name: value.double().numpy() for name, value in weights.items()}
    clear = interpreter.execute(graph, arrays, tokens)
    run = spu.run(graph, arrays, tokens, protocol="semi2k", setting=EngineSetting())
    return float(np.abs(np.asarray(run.logits) - clear).max())


@pytest.mark.slow
@pytest.mark.needs_engine
@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+fLN+R", "1xoSoFs-1xoSoRo"])
def test_folding_costs_no_precision_under_the_engine(name: str) -> None:
    architecture = parse(name, base_architecture("tiny")).architecture
    generator = torch.Generator().manual_seed(0)
    model = Objective(Candidate(architecture=architecture, recipe=Recipe()), generator).model
    weights = dict(deployed_weights(model))
    if architecture.tied_embeddings:
        weights["logits.weight"] = weights["embed.weight"]
    tokens = np.arange(SEQ_LEN) * 7 % architecture.vocab_size
    folded = fold(architecture, weights)
    assert folded.architecture == deployed(architecture)
    trained_error = engine_error(architecture, weights, tokens)
    assert engine_error(folded.architecture, dict(folded.weights), tokens) <= 2 * trained_error + LEAST_ERROR
