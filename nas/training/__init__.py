"""Training of one candidate, and its reports. Does not depend on studies."""
