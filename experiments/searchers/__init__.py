"""Which searcher finds the best front for the fewest trained tokens: a table of trainings, replayed."""
