"""PoolSettings and PoolConfig: what a caller says about a pool. Checked here, once; the values travel whole."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from envfleet._native import core
from envfleet.contract.checks import positive_or_none, true_or_false, whole_number
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.contract.settings import keep_plain_numbers

BackendName = Literal["auto", "native", "process", "serial", "vector"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
ObservationMode = Literal["same", "different"]
OnEnvError = Literal["raise", "restart"]
EnvStates = Literal["own", "pickle"]


MOST_RESTARTS = 2**31 - 1  # fits every message and the C++ core

Line = core.Line  # which batches results go to: those with a row for each env, or those of the first that finish


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How a pool runs its envs, whatever their number.

    Attributes:
        num_workers: Number of child processes, or of threads (the calling one included) for native envs; default None:
            one for each CPU that the process may use.
        pin_workers: Whether to bind each worker to its share of the CPUs, if there are at least as many CPUs; default
            None: child processes of a pool that waits for all envs yes, all others no.
        on_env_error: "raise" (default): an env that fails, or whose process dies, raises EnvFailed. "restart": its row
            is truncated, `info["env_error"]` says why, and the env is built anew.
        max_env_restarts: With "restart": number of failures of an env, without a finished episode between them, after
            which EnvFailed is raised all the same; default 10.
        timeout_s: Seconds that a step or reset of one env may take; default 60. None: no limit; the log says once a
            minute what is waited for. Beyond it PoolTimeout is raised and nothing is lost; with "restart", and on the
            workers of a cluster, the env fails instead, and only that one (process pools). For calls of methods, and
            for batches of native envs, it is the whole wait.
        env_states: How `get_state()` saves a Python env. "own" (default): by the env's own `get_state()` and
            `set_state(state)`. "pickle": an env without these is pickled whole.
    """

    num_workers: int | None = None  # processes, or threads of native envs; None: one for each CPU it may use
    pin_workers: bool | None = None  # bind each to its share of the CPUs; None: processes of synchronous pools
    on_env_error: OnEnvError = "raise"  # "restart": the row of an env that fails is truncated, and it is built anew
    max_env_restarts: int = 10  # with "restart": failures of an env without a finished episode before EnvFailed
    timeout_s: float | None = 60.0  # seconds that a step or reset of one env, or a call, may take; None: no limit
    env_states: EnvStates = "own"  # how Python envs are saved: by their own get_state(); "pickle": else pickled whole

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        keep_plain_numbers(self)
        if self.on_env_error not in get_args(OnEnvError):
            raise UsageError(f"on_env_error must be 'raise' or 'restart'; got {self.on_env_error!r}")
        if self.num_workers is not None:
            whole_number("num_workers", self.num_workers)
        if self.pin_workers is not None:
            true_or_false("pin_workers", self.pin_workers, " or None")
        whole_number("max_env_restarts", self.max_env_restarts, 0 if self.env_restarts is None else 1, MOST_RESTARTS)
        positive_or_none("timeout_s", self.timeout_s)
        if self.env_states not in get_args(EnvStates):
            raise UsageError(f"env_states must be 'own' or 'pickle'; got {self.env_states!r}")

    @property
    def env_restarts(self) -> int | None:
        """Failures of an env that lead to a restart, counted since its last finished episode; None: none does."""
        return self.max_env_restarts if self.on_env_error == "restart" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(PoolSettings):
    """All settings of one pool."""

    num_envs: int  # of this pool
    batch_size: int | None = None  # rows of a batch; None: `num_envs`
    backend: BackendName = "auto"  # "native", "process", "serial" or "vector"; "auto": the best that runs the env
    autoreset: Autoreset = Autoreset.NEXT_STEP  # until the mode is switched
    switches_autoreset: bool = False  # the mode may be switched to any other
    observation_mode: ObservationMode = "same"  # "different": bounds of observations may differ from env to env
    start_timeout_s: float | None = 300.0  # seconds until the envs must be built; None: no limit
    fails_late: bool = False  # an env beyond `timeout_s` fails, and nothing is raised for the pool; so on workers

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        super(PoolConfig, self).__post_init__()  # with arguments: slots make another class of this one
        whole_number("num_envs", self.num_envs)
        if self.batch_size is not None and whole_number("batch_size", self.batch_size) > self.num_envs:
            raise UsageError(f"batch_size must be between 1 and num_envs={self.num_envs}; got {self.batch_size}")
        if self.backend not in BACKENDS:
            raise UsageError(f"no backend is called {self.backend!r}; known: {', '.join(BACKENDS)}")
        if self.observation_mode not in get_args(ObservationMode):
            raise UsageError(f"observation_mode must be 'same' or 'different'; got {self.observation_mode!r}")
        positive_or_none("start_timeout_s", self.start_timeout_s)
        true_or_false("fails_late", self.fails_late)

    @classmethod
    def of(cls, settings: PoolSettings, **others: Any) -> PoolConfig:
        """These settings, and the others."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(PoolSettings)}, **others)

    @property
    def has_finals(self) -> bool:
        """Have batches room for final observations? Same-step autoreset needs it.

        It takes addresses only: the kernel gives it no memory before the first final observation is written (ADR 6).
        """
        return self.switches_autoreset or self.autoreset is Autoreset.SAME_STEP

    @property
    def gives_up_late(self) -> bool:
        """Whether the task of an env beyond `timeout_s` ends as a failure, instead of PoolTimeout (process pools)."""
        return self.fails_late or self.env_restarts is not None

    @property
    def rows(self) -> int:
        """Rows of a batch that recv() returns."""
        return self.num_envs if self.batch_size is None else self.batch_size

    @property
    def pins_processes(self) -> bool:
        """Whether child processes are bound to CPUs.

        Not where the caller works beside them: a process that is bound to the caller's CPU takes turns with it, while
        another CPU is idle.
        """
        return self.line is Line.FULL if self.pin_workers is None else self.pin_workers

    @property
    def line(self) -> Line:
        """The line that send() uses."""
        return Line.FULL if self.rows == self.num_envs else Line.FIRST_READY


DEFAULTS = PoolConfig(num_envs=1)  # make() has the same
