"""Rewrites of op graphs for the way a model is run, which changes its cost but not the logits that are asked for."""
