"""Training of one candidate, and what it reports. Knows nothing of studies."""
