"""Changes of a model in training, by the number of the step: parts of its parent go, linear FFNs stay foldable."""
