"""Starts Ray or connects to a cluster, and lists its nodes."""

import atexit
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants

from costmodel.config.bugs import described
from nas.study.resources import Node, Resources
from nas.study.trials import RunHaltedError

_log = logging.getLogger(__name__)

# Makes Ray report no usage, write no files of results, and leave signals, priorities and working folders as they are.
QUIET_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15 by default, which leaves a trial 3 % of a core that it shares
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C must interrupt this process without waiting for running trials
    "TUNE_MAX_PENDING_TRIALS_PG": "1",  # ask for a trial only when a worker is free
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # our searcher has no single metric
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths keep their meaning in a worker
}
REACHED_WITHIN_S = 10.0
SLOW = "timed out"  # in the text of Ray's error if its processes do not start within its 30 s
STARTS = 10  # attempts to start Ray
MOST_TEMPORARY = 27  # characters; our folders and Ray append up to 79, and a socket's path may have 107
OBJECT_STORE_BYTES = 100_000_000  # trials exchange a few kilobytes; Ray would reserve 30 % of the memory


def cluster_nodes(address: str) -> tuple[Node, ...]:
    """Return the `alive_nodes` of the cluster at `address`, sorted by name. Raises RunHaltedError as `ray_session`."""
    with ray_session(Resources(slots=0, max_concurrent=None, ray_address=address), {}):
        return tuple(sorted(alive_nodes(), key=lambda node: node.name))


@contextmanager
def ray_session(resources: Resources, worker_env: Mapping[str, str]) -> Iterator[None]:
    """Start Ray on this machine, or connect to the cluster at `resources.ray_address`, for a `with` block.

    Without an address, an existing session of this process is used and left open. worker_env: environment variables of
    the workers of a new session. Raises RunHaltedError if Ray does not start, the cluster cannot be reached, or this
    process already has a session and an address is given.
    """
    address = resources.ray_address
    os.environ.update(QUIET_ENV)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # lost trials are resumed, or their record has the reason
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if ray.is_initialized():
        if address is not None:
            raise RunHaltedError(
                f"this process is connected to Ray already and cannot go to {address}; leave that first"
            )
        yield
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    _init(resources, worker_env)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would end the process without saving
    try:
        yield
    finally:
        ray.shutdown()


def _init(resources: Resources, worker_env: Mapping[str, str]) -> None:
    address, local = resources.ray_address, dict[str, Any]()
    # The only switch that makes Ray bind to loopback alone on Linux; it is not public.
    ray_constants.ENABLE_RAY_CLUSTER = address is not None
    if address is None:
        local = {
            "num_cpus": resources.at_a_time * resources.threads_per_trial,
            "num_gpus": resources.num_gpus,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_temp_dir": _own_folder(tempfile.gettempdir()),
        }
    elif (host_and_port := address.removeprefix("ray://")) != "auto":
        host, _, port = host_and_port.rpartition(":")
        try:  # since Ray takes more than a minute to notice that nobody listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN_S).close()
        except (OSError, OverflowError) as error:
            reason = f"nobody answers within {REACHED_WITHIN_S:.0f} s ({error})"
            raise RunHaltedError(f"Ray cannot be reached at {address}: {reason}") from None
    for num_left in reversed(range(STARTS)):
        try:
            ray.init(
                address=address or "local",  # never the address in RAY_ADDRESS
                runtime_env={"env_vars": dict(worker_env)},
                logging_level=logging.ERROR,
                log_to_driver=False,
                **local,
            )
            return
        except Exception as error:  # Ray raises a bare Exception if its own processes take longer than 30 s to start
            ray.shutdown()
            if SLOW not in str(error).lower() or not num_left:
                where = "on this machine" if address is None else f"at {address}"
                load = "; this machine is too busy to start it; try again later" if SLOW in str(error).lower() else ""
                raise RunHaltedError(f"Ray cannot be reached {where}: {described(error)}{load}") from error
            _log.info("waiting for Ray, whose processes take long to start on this busy machine; starting them again")


def _own_folder(temporary: str) -> str:
    """Return a path for Ray's sockets and logs, short and ASCII, in a folder of mode 0700 that is removed at exit.

    The path is of a subfolder, since Ray lets everyone write to the folder that it is given.
    """
    is_short = (temporary.isascii() and len(temporary) <= MOST_TEMPORARY) or not os.access("/tmp", os.W_OK)
    folder = tempfile.mkdtemp(prefix="nas-", dir=temporary if is_short else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "r")


def alive_nodes() -> list[Node]:
    """Return the nodes of the connected cluster that are alive and have cores."""
    return [
        Node(
            node_id=node["NodeID"],
            name=f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})",
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get("CPU")
    ]
