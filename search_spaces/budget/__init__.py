"""What a budget leaves of a search space: prices on its graph, exact counts, uniform sampling."""
