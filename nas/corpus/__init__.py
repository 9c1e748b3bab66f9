"""Training text: from documents to token files."""
