"""Training text: from documents to token files, and n-gram baselines on it."""
