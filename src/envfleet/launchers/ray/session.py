"""The connection of this process to Ray. There can be one only: whoever makes it ends it, when its last run is over."""

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

ANSWER_S = 5.0
SHUTDOWN_S = 10.0  # it takes 7 s if the control store (GCS) is gone
# The first bytes of HTTP/2, which gRPC speaks: a greeting and an empty frame of settings. The other side answers
# with its own settings at once.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
HTTP2_SETTINGS = 4

Answer = TypeVar("Answer")

_lock = threading.RLock()  # guards what follows
_num_holders = 0
_our_driver_id: str | None = None  # of the connection that was made here, not by the user
_our_runtime_env: dict[str, Any] | None = None  # of that connection: of all that is started through it


class Session:
    """A run's share of the connection."""

    def __init__(self, driver_id: str) -> None:
        """The connection, as it is now."""
        self._driver_id = driver_id

    @property
    def is_alive(self) -> bool:
        """Not, if the user has called ray.shutdown(). Whatever is asked of Ray then would start another one."""
        return _driver_id() == self._driver_id

    def brings(self, runtime_env: dict[str, Any] | None) -> bool:
        """Whether all that is started has this runtime_env already."""
        return self._driver_id == _our_driver_id and runtime_env == _our_runtime_env

    def release(self) -> None:
        """The run is over."""
        global _num_holders, _our_driver_id
        with _lock:
            _num_holders -= 1
            if _num_holders == 0 and self.is_alive and self._driver_id == _our_driver_id:
                _our_driver_id = None
                _shut_down()


class NoAnswer(ClusterError):
    """Ray's control store (GCS) does not answer, for now perhaps."""


def in_time(
    call: Callable[[], Answer], what: str, timeout_s: float, undo: Callable[[Answer], object] | None = None
) -> Answer:
    """What a call of Ray returns. Raises NoAnswer if it takes longer; when it returns in the end, it is undone.

    Ray has no deadline for a control store that is away: it waits, and ends the whole process after a minute.
    """
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # whoever waits raises it
            answer.set_exception(error)

    def take_back(late: concurrent.futures.Future[Answer]) -> None:
        if undo is not None:
            with contextlib.suppress(Exception):  # there may be no cluster any more
                undo(late.result())

    threading.Thread(target=run, name="envfleet-ray-call", daemon=True).start()
    if not concurrent.futures.wait([answer], timeout_s).done:
        answer.add_done_callback(take_back)
        raise NoAnswer(f"Ray has not answered {what} within {timeout_s:g} s: is its head node (GCS) up?")
    return answer.result()


def import_ray() -> Any:
    """Raises MissingExtra."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f'the Ray launcher needs ray: pip install "envfleet[ray]" ({error})') from error
    return ray


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> str:
    """Be connected to the cluster, and say at which host it is. Raises ClusterError.

    Folders and modules of a runtime_env are brought to the cluster by a new connection only: that is Ray's rule.
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
                    f"Ray(address={address!r}): this process is connected to the Ray cluster at {at}, and it can be to "
                    "one only: use address='auto', or call ray.shutdown() first"
                )
            _shut_down()  # of a run that never began
        found = _running_cluster() if address == "auto" else address
        if found is None:
            logger.info("no Ray cluster runs here: starting one on this machine, for this run")
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
    """Be connected, until release()."""
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
        logger.warning("%s; it is left to end by itself", error)


def _driver_id() -> str | None:
    """Of this connection; each has its own. Ray counts connections, but in each cluster from one on."""
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
    """Whether both mean the same port of the same host."""
    if address.rpartition(":")[2] != other.rpartition(":")[2]:
        return False
    try:
        return socket.gethostbyname(_host(address)) in (socket.gethostbyname(_host(other)), "127.0.0.1")
    except OSError:
        return False


def _running_cluster() -> str | None:
    """The cluster that Ray itself would find, if it answers; None: there is none, one is to be started.

    Ray would wait for minutes for one that is gone, and of which only this file is left.
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
    """Raises OSError or ValueError unless something at this address speaks as Ray does, soon."""
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
            # Workers log to files of their own: there is nothing to print here.
            ray.init(log_to_driver=False, **copy.deepcopy(settings))  # Ray writes into a runtime_env
        except Exception as error:  # Ray raises whatever comes: ConnectionError, ValueError, RuntimeError, ...
            raise ClusterError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray has SIGTERM end a driver with its own exit code; the run has a better way, which needs the default."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _no_usage_stats() -> Iterator[None]:
    """Nothing is sent anywhere by a cluster that was started for a run, unless the user has said otherwise."""
    name = "RAY_USAGE_STATS_ENABLED"
    told = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if told is None:
            os.environ.pop(name, None)
