"""Private answers of a chosen model, and its perplexity in fixed point: set-up, prompt, run, and report of results."""
