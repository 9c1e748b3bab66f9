"""Progress, summaries, figures and the HTML report of a run."""
