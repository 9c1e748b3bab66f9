"""Removed flags by the name of their setting, each with its replacement."""

REMOVED = {
    "knowledge": "a search learns from its own trainings alone",
    "warm_start": "continue a run by --resume RUN, with another --budget-latency or a larger --num-trials",
}
