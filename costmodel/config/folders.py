"""Where this package keeps what no run folder holds."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Corpora, compiled code and reports of bugs: under XDG_CACHE_HOME, else ~/.cache. RuntimeError without a home."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "private-inference-nas"
