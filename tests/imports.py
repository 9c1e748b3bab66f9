"""What a command loads: seconds of every start."""

import subprocess
import sys

HEAVY = (
    *("torch", "scipy", "numpy", "networkx", "jsonargparse", "ray", "jax", "spu", "matplotlib", "pandas", "rich"),
    *("transformers", "jinja2", "costmodel"),
)


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a process has imported at the end of a program."""
    script = f"import sys\n{code}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.splitlines()[-1].split())
