"""The searcher `trellis`: a Bayesian surrogate that adds up over layers, solved exactly on the graph."""
