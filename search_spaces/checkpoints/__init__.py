"""Reads the architecture of checkpoints of transformers and llama.cpp from their settings, without weights."""
