"""PoolBuilder: builds a worker's pool, and others in its place, with all that was set and changed since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from envfleet.cluster.wire.messages import ChangeEnvs, PoolPlan, Welcome
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.contract.arrays import Arrays
from envfleet.contract.episode import Autoreset
from envfleet.contract.live_changes import Arguments, Change, LiveChanges
from envfleet.contract.spec import EnvSpec
from envfleet.pool.make import make_pool
from envfleet.pool.native.plugins import load_native
from envfleet.pool.pool import EnvPool
from envfleet.pool.registrations import register_all


class PoolBuilder:
    """Knows what the head has said of the envs.

    Attributes:
        plan: As the welcome has it.
        spec: Of the envs.
        attributes: What set_attr() has set, by name: a value for each env.
        changes: That envs apply in their next reset.
        num_changes: The number of the last one.
    """

    def __init__(self, welcome: Welcome, arrays: Arrays, while_waiting: Callable[[], None]) -> None:
        """Build nothing yet. `while_waiting` is called now and then while envs are at work."""
        self._while_waiting = while_waiting
        self.plan = welcome.plan
        self.spec = _spec_of(welcome.plan, arrays)
        self.attributes: dict[str, list[Any]] = {name: from_plain(each) for name, each in welcome.attributes.items()}
        self.changes = LiveChanges(map(_change_of, welcome.changes))
        self.num_changes = max((each.number for each in welcome.changes), default=0)

    def build(self, autoreset: Autoreset) -> EnvPool:
        """A pool in this mode, none of whose envs was reset. An env that cannot be built raises here."""
        envs = make_pool(self.spec, replace(self.plan.pool, autoreset=autoreset, fails_late=True))
        try:
            envs.call_while_waiting(self._while_waiting)
            for name, values in self.attributes.items():
                envs.set_attr(name, values)
            for change in self.changes.last:
                envs.change(change)
        except BaseException:
            envs.close()
            raise
        return envs

    def add_change(self, order: ChangeEnvs) -> Change | None:
        """Keep a change for the pools to come. None: it was in the welcome."""
        if order.number <= self.num_changes:
            return None
        change, self.num_changes = _change_of(order), order.number
        self.changes.add(change)
        return change


def _change_of(message: ChangeEnvs) -> Change:
    arguments = Arguments(tuple(from_plain(message.args)), from_plain(message.kwargs))
    return Change.of(message.number, message.kind, message.name, arguments)


def _spec_of(plan: PoolPlan, arrays: Arrays) -> EnvSpec:
    if plan.env is None:
        pickled = arrays["env"].tobytes()  # of the head, over an authenticated connection
        spec, registrations = cloudpickle.loads(pickled)
        register_all(registrations.specs())
        assert isinstance(spec, EnvSpec)
        return spec
    if plan.native_file is not None:
        load_native(plan.native_file)
    kwargs: Any = plan.env.kwargs
    return replace(plan.env, kwargs=[from_plain(each) for each in kwargs])
