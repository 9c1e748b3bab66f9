"""Flags that former versions had, by the name of the setting, and what to use in their place."""

REMOVED = {
    "knowledge": "a search learns from its own trainings alone",
    "warm_start": "continue a run by --resume RUN, with another --budget-latency or a larger --num-trials",
}
