"""Studies and runs as Python objects: what the commands call, and what `nas.Study` and `nas.load_run` give."""
