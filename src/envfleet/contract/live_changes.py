"""Change, LiveChanges and EnvChanges: what envs change before their next reset, while they run. The only home of it.

Changes are numbered: 1, 2, 3, ... Each env applies all that it has not applied yet, in this order, in its next reset.
An env that is built anew begins with the last change of each kind and name; so does one that has not been reset for
more than MOST_PENDING changes, or they would fill the memory. One that is put into a saved state has those that were
applied before it was saved, and does not apply them once more: those of the same number, kind, name and content, since
a state may come from another pool, which numbers its changes from 1 as well. The info of every reset that follows a
change has, under LIVE_CHANGE, the number of the last one.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import pickle
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from envfleet.contract.errors import UsageError

LIVE_CHANGE = "live_change"  # the key in the info of a reset
MOST_PENDING = 1000  # changes that an env keeps beside the last of each kind and name

_BUSINESS_OF_THE_POOL = ("reset", "step", "close")


class ChangeFailed(Exception):
    """An env could not apply a change."""


class ChangeKind(enum.Enum):
    """What a change does; the values cross the wire."""

    ATTRIBUTE = "attribute"  # sets an attribute
    CALL = "call"  # calls a method
    OPTIONS = "options"  # the options of this reset and of those that follow


Applied = Collection[tuple[Any, ...]]  # changes by number, kind, name and content, in plain values


class Arguments(NamedTuple):
    """Of a call; a value to set, or options, are its only argument."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Change(NamedTuple):
    """One change of all envs. The functions below make it, and refuse what no env could apply."""

    number: int
    kind: ChangeKind
    name: str  # of the attribute or method; "" for options
    arguments: Arguments | bytes  # bytes: pickled by another process of the same pool; each env has a copy of its own
    content: str  # a hash of the arguments, as they were when the change was made

    @classmethod
    def of(cls, number: int, kind: ChangeKind, name: str, arguments: Arguments) -> Change:
        """A change with these arguments."""
        return cls(number, kind, name, arguments, _content_of(arguments))

    @property
    def identity(self) -> tuple[int, str, str, str]:
        """What it is known by in saved states."""
        return self.number, self.kind.value, self.name, self.content

    def __str__(self) -> str:
        """As the caller wrote it."""
        text = {
            ChangeKind.ATTRIBUTE: f"broadcast({self.name!r}, ...)",
            ChangeKind.CALL: f"call_at_reset({self.name!r}, ...)",
            ChangeKind.OPTIONS: "set_reset_options(...)",
        }[self.kind]
        return f"change {self.number}, {text}"

    def load(self) -> Arguments:
        """The arguments; unpickled if need be, which may raise anything."""
        return Arguments(*pickle.loads(self.arguments)) if isinstance(self.arguments, bytes) else self.arguments


def _content_of(arguments: Arguments) -> str:
    """The same text for the same arguments; what cannot be pickled is like nothing else."""
    try:
        return hashlib.blake2b(pickle.dumps(tuple(arguments), protocol=5), digest_size=16).hexdigest()
    except Exception:
        return uuid.uuid4().hex


def attribute_change(number: int, name: str, value: Any) -> Change:
    """Set an attribute of each env."""
    return Change.of(number, ChangeKind.ATTRIBUTE, _checked_name(name, "an attribute"), Arguments((value,), {}))


def call_change(number: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Change:
    """Call a method of each env."""
    if name in _BUSINESS_OF_THE_POOL:
        raise UsageError(f"call_at_reset() cannot call {name!r} of an env: the pool does that by itself")
    return Change.of(number, ChangeKind.CALL, _checked_name(name, "a method"), Arguments(args, kwargs))


def options_change(number: int, options: Mapping[str, Any] | None) -> Change:
    """Reset each env with these options from now on."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"options must be a dict, or None for none; got {type(options).__name__}")
    if options is not None and "reset_mask" in options:
        raise UsageError("reset_mask chooses the envs of one reset(): pass it there, not to set_reset_options()")
    return Change.of(number, ChangeKind.OPTIONS, "", Arguments((None if options is None else dict(options),), {}))


def _checked_name(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"name must be the name of {what} of the envs; got {name!r}")
    return name


def _put_last(changes: dict[tuple[ChangeKind, str], Change], change: Change) -> None:
    """In place of the one before of its kind and name, at the end."""
    key = change.kind, change.name
    changes.pop(key, None)
    changes[key] = change


class LiveChanges:
    """The changes of all envs of one process."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._last: dict[tuple[ChangeKind, str], Change] = {}
        self._envs: list[EnvChanges] = []
        for change in changes:
            self.add(change)

    @property
    def last(self) -> list[Change]:
        """The last change of each kind and name, in the order in which they were made."""
        return list(self._last.values())

    def add(self, change: Change) -> None:
        """Have each env apply a change in its next reset."""
        _put_last(self._last, change)
        for env in self._envs:
            env.add(change, MOST_PENDING + len(self._last))

    def of_new_env(self) -> EnvChanges:
        """What one more env has to apply, from now on too."""
        self._envs.append(EnvChanges(self))
        return self._envs[-1]


class EnvChanges:
    """What one env has still to apply, and what it has applied."""

    def __init__(self, of_all: LiveChanges) -> None:
        self._of_all = of_all
        self.begin_anew()

    def begin_anew(self, applied: Applied = ()) -> None:
        """The env was built anew; or another one took its place, in which `applied` were applied before."""
        self.pending: deque[Change] = deque(self._of_all.last)
        self._number = 0  # of the last change that was applied
        self._applied: dict[tuple[ChangeKind, str], tuple[Any, ...]] = {}  # likewise, of each kind and name
        self._options: dict[str, Any] | None = None
        for change in self._pending_of(applied):
            if change.kind is ChangeKind.OPTIONS:  # the env does not keep them
                self._apply(change, None)
            self._done(change)

    @property
    def applied(self) -> Applied:
        """What the env has applied, for its saved state."""
        return tuple(self._applied.values())

    def catch_up(self, applied: Applied, env: Any) -> None:
        """Apply at once what is pending of `applied`. Then the env is put into a state that has come after these.

        That need not save what they have changed. One that raises was told of when it was made.
        """
        for change in self._pending_of(applied):
            with contextlib.suppress(Exception):
                self._apply(change, env)
            self._done(change)

    def _pending_of(self, applied: Applied) -> list[Change]:
        """What is pending of `applied`, and what came before these under the same kind and name."""
        pending = {each.identity for each in self.pending}
        last = {each[1:3]: each[0] for each in map(tuple, applied) if each in pending}
        return [each for each in self.pending if each.number <= last.get((each.kind.value, each.name), 0)]

    def add(self, change: Change, num_pending: int) -> None:
        """One more to apply; with more than `num_pending`, only the last of each kind and name are kept."""
        self.pending.append(change)
        if len(self.pending) > num_pending:
            last: dict[tuple[ChangeKind, str], Change] = {}
            for each in self.pending:
                _put_last(last, each)
            self.pending = deque(last.values())

    def apply(self, env: Any) -> None:
        """Apply what is pending. A change that raises is not tried again, unless the env is built anew.

        Raises:
            ChangeFailed: The env has no such attribute or method, or it raised.
        """
        while self.pending:
            change = self.pending[0]
            try:
                self._apply(change, env)
            except Exception as error:
                self._done(change)
                raise ChangeFailed(f"{change}: {type(error).__name__}: {error}") from error
            self._done(change)

    def _done(self, change: Change) -> None:
        if self.pending[0] is change:
            self.pending.popleft()
        else:
            self.pending = deque(each for each in self.pending if each is not change)
        self._number = max(self._number, change.number)
        self._applied[change.kind, change.name] = change.identity

    def _apply(self, change: Change, env: Any) -> None:
        args, kwargs = change.load()
        if change.kind is ChangeKind.OPTIONS:
            self._options = args[0]
            return
        if not env.has_wrapper_attr(change.name):
            what = "attribute" if change.kind is ChangeKind.ATTRIBUTE else "method"
            raise AttributeError(f"{env} has no {what} {change.name!r}; an env must have it before it can be changed")
        if change.kind is ChangeKind.ATTRIBUTE:
            env.set_wrapper_attr(change.name, *args)
        else:
            env.get_wrapper_attr(change.name)(*args, **kwargs)

    def options(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """The options of a reset: those that the caller gave, else a copy of those that were set for all resets."""
        return given if given or self._options is None else dict(self._options)

    def told(self, info: dict[str, Any]) -> dict[str, Any]:
        """The info of a reset, with the number of the last change."""
        return {**info, LIVE_CHANGE: self._number} if self._number else info
