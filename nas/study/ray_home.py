"""A home directory for Ray, which looks for one on import and stores a token in it."""

import os

from costmodel.config.bugs import default_cache_dir, require_writable_cache


def require_home() -> None:
    """Use the cache folder as home if there is none or it cannot be written to."""
    home = os.path.expanduser("~")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        require_writable_cache()
        folder = default_cache_dir()
        os.environ.update(HOME=str(folder), XDG_CACHE_HOME=str(folder.parent))
