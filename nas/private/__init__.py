"""The chosen model, answering privately: which model, which prompt, and what is said of the answer."""
