"""Distillation: teacher, block library, gradual removal of the parent's parts, and linear FFNs that stay foldable."""
