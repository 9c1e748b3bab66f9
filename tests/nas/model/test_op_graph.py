from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from costmodel.deployment.deploy import Deployment
from costmodel.execution import interpreter
from costmodel.execution.interpreter import execute
from costmodel.execution.op_functions import FUNCTIONS
from costmodel.tracing.trace import trace
from nas.attention import causal
from nas.model.decoder import Decoder, build
from nas.model.mpc_friendly import ScoreBound
from nas.model.norms import frozen_norms
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.kv_cache import kv_cache
from tests.small_models import GPT2, PYTHIA

LLAMA = base_architecture(
    "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, head_size=8, d_model=16, d_ff=24, vocab=40, context=16)
)
QWEN2 = replace(LLAMA, block="qwen2", num_kv_heads=None)
NAMES = (
    "SM+LN+G",
    "SM+LN+R",
    "SM+LN+SqR",
    "SM",
    "SM(t)+LN+LR",
    "SM+ScFFN",
    "SM+ScFuFFN_i1",
    "1xLSoGo-1xoTLRs",
    "1xoTLKs-1xoSooo",
)
CHOICES = (
    "1xLHLXo-1xMSMGo 1xoooRo-1xLSooo 1xlSmEs-1xmQlPo-l 1xLULGo-1xmHlFo-m 1xooMRo-1xMTMIo-o 2xooLRo SM+LR "
    "SM(t)+ScFuFFN_i2 1xlSmRs-1xooLRo-m 2xooooo"
)
SIMPLIFIED = ("HH(SM+G)", "HH(SM+ScFFN)", "HH(SM(t)+ScFuFFN_i1)", "HH(1xLSoFs-1xoSLRo)", "HH(1xlQmRo-1xmTlPs-M)")
GATED = "SM+RMS+SwiGLU 1xMBMVo-1xmHmBs 1xMHoWs-1xMTMIo 1xMBmBo-1xooMFo-o 1xMSMRo-1xMSooo 1xMSMQo-1xmBMQs"
MEMBERS = [
    *product((GPT2, PYTHIA), (*NAMES, *CHOICES.split())),
    *product((GPT2,), SIMPLIFIED),
    *product((LLAMA, QWEN2), GATED.split()),
]
MEMBERS += [
    (replace(base, num_kv_heads=1), name) for base in (GPT2, PYTHIA) for name in ("SM+LN+G", "2xLBLBo", "2xLHLVo")
]
MEMBERS += [(GPT2, "HH(2xLBLBo)"), (GPT2, "HH(1xLPLBo-1xLSLGo)"), (PYTHIA, "1xLPLGo-1xlPoRo"), (LLAMA, "2xMPMQo")]
FORMS = [("2quad", "piecewise"), ("relu", "piecewise"), ("2quad", "exact")]
BLOCKS = [(GPT2, "SM(t)+LN+G"), (PYTHIA, "SM+G"), (GPT2, "HH(SM(t)+G)")]
CACHED = [*BLOCKS, (LLAMA, "1xMBMQo-1xmHMWo"), (GPT2, "1xLPLGo-1xLQLGo")]
RELATIVE_TOLERANCE = 1e-6


def drawn(architecture: Architecture, seed: int = 0) -> Decoder:
    """A model whose every weight matters: no gain, slope or scale at its initial value."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Decoder(architecture).double()
    generator = torch.Generator().manual_seed(seed)
    bounds = [module.weight for module in model.modules() if isinstance(module, ScoreBound)]
    with torch.no_grad():
        for parameter in (*model.parameters(), *bounds):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for place, norm in enumerate(frozen_norms(model).values()):
            norm.sigma.fill_(0.5 + 0.1 * place)
            norm.set_frozen()
    return model


def torch_run(architecture: Architecture, length: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Deployed weights, tokens and logits of a drawn model."""
    model = drawn(architecture)
    tokens = np.random.default_rng(1).integers(architecture.vocab_size, size=length)
    weights = {name: value.numpy() for name, value in deployed_weights(model).items()}
    with torch.no_grad():
        batch = torch.from_numpy(np.stack((tokens[::-1], tokens)))
        return weights, tokens, model(batch).logits[1].numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * np.abs(theirs).max())


@pytest.mark.parametrize(("base", "name"), MEMBERS)
def test_weights_and_logits_are_the_torch_models(base, name):
    architecture = parse(name, base).architecture
    weights, tokens, logits = torch_run(architecture, length=11)
    assert_close(interpreter.execute(lower(architecture, 11), weights, tokens), logits)
    expected = {
        f"{node.name}.{suffix}": shape
        for node in lower(architecture, architecture.context)
        for suffix, shape in node.op.weight_shapes.items()
    }
    assert {key: value.shape for key, value in weights.items()} == expected


@pytest.mark.parametrize(("base", "name"), BLOCKS)
@pytest.mark.parametrize(("softmax", "gelu"), FORMS)
def test_other_forms_are_the_torch_models(base, name, softmax, gelu):
    architecture = replace(parse(name, base).architecture, softmax=softmax, gelu=gelu)
    weights, tokens, logits = torch_run(architecture, length=11)
    assert_close(interpreter.execute(lower(architecture, 11), weights, tokens), logits)
    plain = interpreter.execute(lower(parse(name, base).architecture, 11), weights, tokens)
    assert np.abs(plain - logits).max() > 1e-2 * np.abs(logits).max()  # the forms are different functions


@pytest.mark.parametrize(("base", "name"), CACHED)
@pytest.mark.parametrize("softmax", ["exact", "2quad", "relu"])
def test_a_token_against_kept_keys_and_values_is_the_last_of_the_whole_sequence(base, name, softmax):
    architecture = replace(parse(name, base).architecture, softmax=softmax)
    weights, tokens, logits = torch_run(architecture, length=11)
    earlier = interpreter.values(lower(architecture, 10), weights, tokens[:10])
    graph = lower(architecture, 11, Deployment(phase="decode"))
    decoded = interpreter.execute(graph, weights, tokens[10:], kv_cache(graph, earlier))
    assert decoded.shape == (1, architecture.vocab_size)
    assert_close(decoded, logits[-1:])


def test_caches_must_be_all_there_and_of_their_shape():
    weights, tokens, _ = torch_run(GPT2, length=11)
    graph = lower(GPT2, 11, Deployment(phase="decode"))
    caches = kv_cache(graph, interpreter.values(lower(GPT2, 10), weights, tokens[:10]))
    name = "layers.1.attention.keys_values.past"
    with pytest.raises(ValueError, match=rf"`caches` must hold '{name}' of shape \(10, 32\), but it is missing"):
        interpreter.execute(graph, weights, tokens[10:], {key: value for key, value in caches.items() if key != name})
    with pytest.raises(ValueError, match=rf"cache '{name}' must have the shape \(10, 32\), but has \(9, 32\)"):
        interpreter.execute(graph, weights, tokens[10:], caches | {name: caches[name][1:]})


def test_every_op_of_the_blocks_is_run_and_the_parity_can_fail():
    graphs = [lower(parse(name, base).architecture, 4) for base, name in MEMBERS]
    run = {type(node.op) for graph in graphs for node in graph}
    deployed = {"KeyValueCache", "TakeRows", "JoinRows", "JoinColumns"}
    foreign = {"Sigmoid", "Tanh", "Scale", "TakeColumns"}  # of traced models
    assert {op.__name__ for op in set(FUNCTIONS) - run} <= deployed | foreign
    architecture = parse("SM+LN+G", GPT2).architecture
    weights, tokens, logits = torch_run(architecture, length=11)
    weights["layers.1.ffn.up.bias"] = weights["layers.1.ffn.up.bias"] + 0.01
    assert np.abs(interpreter.execute(lower(architecture, 11), weights, tokens) - logits).max() > 1e-3


TRACED_GPT2 = base_architecture("tiny", Dimensions(vocab=40))
TRACED_PYTHIA = base_architecture("pythia-70m", Dimensions(layers=2, heads=2, d_model=32, vocab=40))
TRACED = ("SM+LN+G", "SM+LN+R", "SM", "SM(t)+LN+LR", "SM+ScFFN", "SM+ScFuFFN_i1", "1xLHoRo-1xooLGo", "SM+RMS+SQ")
SEQ_LEN = 9


def parts(graph):
    """How often each op is in each layer."""
    return Counter((node.layer, node.op) for node in graph)


@pytest.mark.parametrize(
    ("base", "name"), [*product((TRACED_GPT2, TRACED_PYTHIA), TRACED), (TRACED_GPT2, "HH(SM(t)+ScFFN)")]
)
def test_tracing_our_model_gives_what_lower_states(base, name):
    architecture = parse(name, base).architecture
    model = build(architecture, torch.Generator().manual_seed(0), temperature_init=0.5)
    traced, lowered = trace(model, SEQ_LEN), lower(architecture, SEQ_LEN)
    assert parts(traced) == parts(lowered)
    weights = {name: value.numpy() for name, value in deployed_weights(model).items()}
    tokens = np.random.default_rng(0).integers(architecture.vocab_size, size=SEQ_LEN)
    np.testing.assert_array_equal(execute(traced, weights, tokens), execute(lowered, weights, tokens))


def test_entropies_are_no_part_of_the_price_and_a_prompt_beyond_the_context_has_none():
    model = Decoder(parse("SM", TRACED_GPT2).architecture)
    with pytest.raises(ValueError, match="raised UserError: a sequence must not be longer than the model's context"):
        trace(model, TRACED_GPT2.context + 1)
    assert parts(trace(WithEntropies(), SEQ_LEN)) == parts(lower(parse("SM", TRACED_PYTHIA).architecture, SEQ_LEN))


class WithEntropies(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(parse("SM", TRACED_PYTHIA).architecture)

    def forward(self, tokens):
        return self.decoder(tokens)


class Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values):
        output = torch.empty_like(queries)
        for row in range(queries.shape[-2]):
            scores = queries[..., row : row + 1, :] @ keys[..., : row + 1, :].mT
            torch.matmul(scores.softmax(dim=-1), values[..., : row + 1, :], out=output[..., row : row + 1, :])
        return output


def test_attention_that_fills_buffers_is_refused_and_not_dropped(monkeypatch):
    monkeypatch.setattr(causal, "_flash", lambda *parts: (Filling.apply(*parts), parts[0].sum(dim=-1)))
    with pytest.raises(ValueError, match="no op stands for: .* in decoder.layers.0.attention, decoder.layers.1.attent"):
        trace(WithEntropies(), SEQ_LEN)
