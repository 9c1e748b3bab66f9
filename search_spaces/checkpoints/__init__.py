"""Checkpoints of others as architectures of ours, from their settings alone: no weights are read."""
