from dataclasses import replace

import numpy as np
import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import drawn_caches, drawn_tokens, drawn_weights
from costmodel.execution import interpreter
from costmodel.ops import OpGraph
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

LOGIT_TOLERANCE = 0.02
DECODE, LAST = Deployment(phase="decode"), Deployment(projection="last")
LLAMA = "1xMSMWo-1xMBmBo-1xmHMVo", "smollm2-135m", Dimensions(layers=3, heads=4, kv_heads=2, head_size=4)
VARIANTS = {
    "plain": ("SM+LN+G", "tiny", Dimensions(heads=4), Deployment()),
    "forms in halves": ("SM+G", "tiny", Dimensions(softmax="2quad", gelu="piecewise"), Deployment(vocab_blocks=2)),
    "last": ("SM+LN+R", "tiny", Dimensions(softmax="relu"), LAST),
    "decode": ("SM(t)+R", "tiny", Dimensions(), DECODE),
    "decode rotary": ("SM+G", "pythia-70m", Dimensions(softmax="2quad", gelu="piecewise"), DECODE),
    "decode simplified": ("HH(SM+ScFuFFN)", "tiny", Dimensions(softmax="relu", layers=2), DECODE),
    "batch": ("SM(t)+LN+R", "tiny", Dimensions(), Deployment(batch=3)),
    "decode batch": ("SM+LN+R", "pythia-70m", Dimensions(layers=2), replace(DECODE, batch=3)),
    "last of a batch": ("HH(SM)", "tiny", Dimensions(layers=2), replace(LAST, rows="needed", batch=3)),
    "llama": (*LLAMA, Deployment()),
    "llama decode batch": (*LLAMA, replace(DECODE, batch=2)),
    "public GPT-2": ("1xLSLGo-1xLSLRo", "gpt2-small", Dimensions(layers=2), Deployment(public_layers="embed,0")),
    "public llama": (*LLAMA, Deployment(public_layers="0-1,head")),
    "client GPT-2": ("1xLSLGo-1xLSLRo", "gpt2-small", Dimensions(layers=2), Deployment(client_layers=0)),
    "client llama": (*LLAMA, replace(DECODE, batch=2, client_layers=2)),
    "public fused": ("1xlTmBs-1xoSoFs-1xMHLKs", "tiny", Dimensions(layers=3), Deployment(public_layers="1-2")),
}
AT_ONCE = {
    "semi2k": "forms in halves,decode simplified,last of a batch,public llama,client GPT-2",
    "aby3": "llama decode batch,public fused,client llama",
}
SLOW = {
    "semi2k": "plain,batch,last,llama,public GPT-2",
    "aby3": "plain,decode,decode batch,decode rotary,public GPT-2,public llama",
    "cheetah": "plain,batch,forms in halves,decode rotary,llama,public GPT-2,public llama,public fused",
}
CASES = [
    *((protocol, name) for protocol, names in AT_ONCE.items() for name in names.split(",")),
    *(
        pytest.param(protocol, name, marks=pytest.mark.slow)
        for protocol, names in SLOW.items()
        for name in names.split(",")
    ),
]


def graph_of(variant: str, seq_len: int) -> OpGraph:
    name, base, forms, deployment = VARIANTS[variant]
    small = replace(forms, layers=forms.layers or 1, vocab=30, heads=forms.heads or 2, d_model=8, d_ff=16)
    return lower(parse(name, base_architecture(base, small)).architecture, seq_len, deployment)


@pytest.mark.needs_engine
@pytest.mark.parametrize(("protocol", "variant"), CASES)
def test_the_engine_computes_the_clear_logits_at_the_predicted_cost(protocol, variant, engine_logits):
    graph, generator = graph_of(variant, seq_len=9), np.random.default_rng(0)
    weights = drawn_weights(graph, generator)
    tokens, caches = drawn_tokens(graph, generator), drawn_caches(graph, generator)
    clear = interpreter.execute(graph, weights, tokens, caches)
    logits = engine_logits(graph, weights, tokens, caches, protocol=protocol)
    assert np.abs(logits - clear).max() < LOGIT_TOLERANCE
    assert (logits.argmax(axis=1) == clear.argmax(axis=1)).all()
