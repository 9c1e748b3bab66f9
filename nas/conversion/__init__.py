"""Trained weights in other forms: folded, of another placement, of transformers."""
