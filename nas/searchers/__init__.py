"""Searchers, which choose the candidates to train next, behind one ask-and-tell interface."""
