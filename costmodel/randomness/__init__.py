"""The correlated randomness that protocol `semi2k` takes from a dealer, and what it costs to make it otherwise."""
