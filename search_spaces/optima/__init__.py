"""Exact optima over a search space: of any score that adds up over layers, within budgets, by dynamic programming."""
