"""What happens to a model while it is trained, by the number of the step: norms freeze, parts of its parent go."""
