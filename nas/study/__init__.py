"""A study: it proposes candidates, trains them in workers, and writes the run folder."""
