"""The part of a search space within a budget: costs on its graph, exact counts, uniform sampling."""
