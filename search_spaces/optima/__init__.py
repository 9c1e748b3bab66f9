"""Exact optima over a search space, within budgets, of scores that add up over layers, by dynamic programming."""
