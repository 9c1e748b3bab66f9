"""Searchers, which choose the candidates to train next from the results so far, behind one interface."""
