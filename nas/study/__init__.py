"""A study: proposals, trials, workers, the run folder."""
