"""Whether the engines are installed, and the commands that install them."""

import sys
from importlib.metadata import version
from importlib.util import find_spec

from costmodel.errors import UserError

INSTALL = "python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"
CRYPTEN_VERSION = "0.4.1"  # `crypten_arrays` replaces internal parts of this version
INSTALL_CRYPTEN = f"python -m pip install --no-deps crypten=={CRYPTEN_VERSION}"
NEWEST_PYTHON = (3, 11)  # the engine has wheels for 3.10 and 3.11


def check_installed(protocol: str) -> None:
    """Raise UserError, with the command to run, if the protocol's engine cannot be imported here."""
    if protocol == "crypten":
        if not all(map(find_spec, ("crypten", "torch"))):
            raise UserError(f"the engine CrypTen is not installed; run: {INSTALL_CRYPTEN}")
        if (have := version("crypten")) != CRYPTEN_VERSION:
            raise UserError(f"CrypTen must be {CRYPTEN_VERSION}, but {have} is installed; run: {INSTALL_CRYPTEN}")
    elif find_spec("spu") is None:
        have, is_old = ".".join(map(str, sys.version_info[:2])), sys.version_info[:2] <= NEWEST_PYTHON
        no_wheel = "" if is_old else f", and has no wheel for this Python {have}, where --protocol crypten runs"
        other = ", or give --protocol crypten, which runs on any Python" if is_old else ""
        raise UserError(
            f"the MPC engine SecretFlow-SPU is not installed{no_wheel}; it needs Python < 3.12 and numpy < 2; run: "
            f"{INSTALL}{other}"
        )
