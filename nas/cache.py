"""Where this package keeps what it prepares once: corpora, compiled code."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Under XDG_CACHE_HOME, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "private-inference-nas"
