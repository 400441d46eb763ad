"""The connection of this process to Ray. There is at most one; if EnvFleet made it, it ends with the last run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from envfleet.contract.errors import ClusterError, MissingExtra, UsageError

logger = logging.getLogger("envfleet.ray")

ANSWER_S = 5.0  # the most that a cluster may take to accept a connection
SHUTDOWN_S = 10.0  # the most that ray.shutdown() may take; it takes 7 s if the control store (GCS) is gone
# The first bytes of HTTP/2, which gRPC uses: a greeting and an empty SETTINGS frame. The other side answers with its
# own SETTINGS frame at once.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
HTTP2_SETTINGS = 4

Answer = TypeVar("Answer")

_lock = threading.RLock()  # guards what follows
_num_holders = 0  # runs that use the connection
_our_driver_id: str | None = None  # of the connection, if EnvFleet made it and not the user
_our_runtime_env: dict[str, Any] | None = None  # of that connection, and so of all actors started through it


class Session:
    """One run's use of the connection, until release()."""

    def __init__(self, driver_id: str) -> None:
        self._driver_id = driver_id

    @property
    def is_alive(self) -> bool:
        """False after ray.shutdown() was called by the user. Any call of Ray would then start another cluster."""
        return _driver_id() == self._driver_id

    def brings(self, runtime_env: dict[str, Any] | None) -> bool:
        """Return whether all actors of this connection have this runtime_env already."""
        return self._driver_id == _our_driver_id and runtime_env == _our_runtime_env

    def release(self) -> None:
        """End the run's use of the connection; the last run to do so closes it if EnvFleet made it."""
        global _num_holders, _our_driver_id
        with _lock:
            _num_holders -= 1
            if _num_holders == 0 and self.is_alive and self._driver_id == _our_driver_id:
                _our_driver_id = None
                _shut_down()


class NoAnswer(ClusterError):
    """Ray's control store (GCS) does not answer now; it may later."""


def in_time(
    call: Callable[[], Answer], what: str, timeout_s: float, undo: Callable[[Answer], object] | None = None
) -> Answer:
    """Return the result of a call of Ray, with a deadline.

    Ray itself has none while its control store is away: it waits, and ends the whole process after a minute.

    Args:
        call: The call.
        what: Its name, for the error.
        timeout_s: The most seconds to wait.
        undo: Called with the result if it arrives after the deadline.

    Raises:
        NoAnswer: The call takes longer.
    """
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # answer.result() raises it
            answer.set_exception(error)

    def take_back(late: concurrent.futures.Future[Answer]) -> None:
        if undo is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                undo(late.result())

    threading.Thread(target=run, name="envfleet-ray-call", daemon=True).start()
    if not concurrent.futures.wait([answer], timeout_s).done:
        answer.add_done_callback(take_back)
        raise NoAnswer(f"Ray has not answered {what} within {timeout_s:g} s: is its head node (GCS) running?")
    return answer.result()


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f'the Ray launcher needs ray: pip install "envfleet[ray]" ({error})') from error
    return ray


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> str:
    """Connect this process to the cluster, unless it is connected already, and return the cluster's host.

    Args:
        address: See `Ray`.
        runtime_env: The runtime_env of a new connection. Ray uploads folders and modules only for a new connection.

    Raises:
        UsageError: This process is connected to another cluster.
        ClusterError: The cluster cannot be reached or started.
        MissingExtra: Ray is not installed.
    """
    global _our_driver_id, _our_runtime_env
    ray = import_ray()
    with _lock:
        if ray.is_initialized():
            at = _gcs_address()
            if address == "auto" or _is_same(address, at):
                return _host(at)
            if _num_holders > 0 or _driver_id() != _our_driver_id:
                raise UsageError(
                    f"Ray(address={address!r}): this process is connected to the Ray cluster at {at}, and Ray allows "
                    "one connection: use address='auto', or call ray.shutdown() first"
                )
            _shut_down()  # host_of_workers() made it for a run that was not launched
        found = _running_cluster() if address == "auto" else address
        if found is None:
            logger.info("no Ray cluster runs on this machine: starting one for this run")
            _init(
                f"Ray(address={address!r}): a Ray cluster cannot be started here",
                include_dashboard=False,
                runtime_env=runtime_env,
            )
        else:
            what = f"Ray(address={address!r}): the cluster at {found} cannot be reached"
            try:
                _require_answer(found)
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"{what}: {error}. Is it running (`ray status --address {found}`), and may this machine connect?"
                ) from error
            _init(what, address=found, runtime_env=runtime_env)
        _our_driver_id, _our_runtime_env = _driver_id(), runtime_env
        return _host(_gcs_address())


def hold(address: str, runtime_env: dict[str, Any] | None = None) -> Session:
    """Connect as connect() does, and keep the connection until release()."""
    global _num_holders
    with _lock:
        connect(address, runtime_env)
        _num_holders += 1
        driver_id = _driver_id()
        assert driver_id is not None
        return Session(driver_id)


def _shut_down() -> None:
    try:
        in_time(import_ray().shutdown, "shutdown()", SHUTDOWN_S)
    except NoAnswer as error:
        logger.warning("%s; it ends by itself later", error)


def _driver_id() -> str | None:
    """Return the identity of the present connection; None if there is none. Ray's job ids repeat between clusters."""
    ray = import_ray()
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_worker_id()}"


def _gcs_address() -> str:
    return str(import_ray().get_runtime_context().gcs_address)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_same(address: str, other: str) -> bool:
    """Return whether both are the same port of the same host."""
    if address.rpartition(":")[2] != other.rpartition(":")[2]:
        return False
    try:
        return socket.gethostbyname(_host(address)) in (socket.gethostbyname(_host(other)), "127.0.0.1")
    except OSError:
        return False


def _running_cluster() -> str | None:
    """Return the address of the cluster that Ray itself would find, if it answers; None if there is none.

    Ray would wait for minutes for a cluster that is gone but has left its file behind.
    """
    told = os.environ.get("RAY_ADDRESS")
    if told:
        return None if told == "local" else told
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
    try:
        address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
        _require_answer(address)
    except (OSError, ValueError):
        return None
    return address


def _require_answer(address: str) -> None:
    """Raise OSError or ValueError unless a server at this address speaks Ray's protocol."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"expected host:port, got {address!r}")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(HTTP2_GREETING)
        header = connection.recv(9)
        if len(header) < 4 or header[3] != HTTP2_SETTINGS:
            raise ValueError(f"what listens at {address} is not Ray")


def _init(what: str, **settings: Any) -> None:
    ray = import_ray()
    with _own_signals(), _no_usage_stats():
        try:
            # log_to_driver: workers log to files of their own, so actors have nothing to print here.
            ray.init(log_to_driver=False, **copy.deepcopy(settings))  # a copy: Ray modifies a runtime_env
        except Exception as error:  # Ray raises ConnectionError, ValueError, RuntimeError and others
            raise ClusterError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's SIGTERM handler, which ray.init() replaces; the run's own handling needs it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _no_usage_stats() -> Iterator[None]:
    """Switch off Ray's usage statistics for a cluster that is started for a run, unless the user has set them."""
    name = "RAY_USAGE_STATS_ENABLED"
    told = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if told is None:
            os.environ.pop(name, None)
