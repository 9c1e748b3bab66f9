"""Private answers of a chosen model: loading the model, encoding the prompt, and reporting the answer and its costs."""
