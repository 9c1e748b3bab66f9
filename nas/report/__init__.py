"""Progress, summaries, figures and the page of a run."""
