"""Architectures that a test computes with: two layers, and as many dimensions as tell what is not to be confused."""

from search_spaces.bases import Dimensions, base_architecture

GPT2 = base_architecture("tiny", Dimensions(vocab=40, context=16))
PYTHIA = base_architecture("pythia-70m", Dimensions(layers=2, heads=2, d_model=32, vocab=40, context=16))
LLAMA = base_architecture(
    "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, vocab=40, context=16)
)
