"""A home for Ray, which looks for one when it is imported and keeps a token there."""

import os

from costmodel.config.bugs import default_cache_dir, require_writable_cache


def require_home() -> None:
    """Lets the cache folder stand in for a home that is missing or cannot be written to.

    Raises UserError if the cache folder cannot be written to either.
    """
    home = os.path.expanduser("~")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        require_writable_cache()
        folder = default_cache_dir()
        os.environ.update(HOME=str(folder), XDG_CACHE_HOME=str(folder.parent))
