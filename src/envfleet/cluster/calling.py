"""Calling: methods and attributes of remote envs, asked for while nothing else is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.cluster.run.run import Run
from envfleet.cluster.stepping import workers_of
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import Call, GetState, SetAttr, SetState
from envfleet.cluster.wire.orders import Order
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.cluster.wire.states import states_from_plain, states_to_plain
from envfleet.contract.arrays import Array
from envfleet.contract.errors import EnvBusy, UsageError
from envfleet.contract.state import EnvState, require_fitting
from envfleet.pool.arguments import values_for

GIVEN_UP = "The call is given up: envs may still carry it out, but what they return is dropped"


class Calling:
    """Calls to remote envs, and the attributes that were set."""

    def __init__(self, run: Run, timeout_s: float | None) -> None:
        self._run = run
        self._head = run.head
        self._timeout_s = timeout_s
        self.attributes: dict[str, Any] = {}  # set to one value for all envs, as they travel: new workers get them, too

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Call a method of each of `env_ids`, or get an attribute. Only their workers are asked."""
        _require_name(name)  # a worker cannot read an order with anything else, and would never carry out the next one
        plain_args, plain_kwargs = to_plain(args, "args"), to_plain(kwargs, "kwargs")
        num_each = self._run.num_envs_per_worker
        orders = {}
        for worker, its_rows in self._rows_of(env_ids).items():
            chosen = None if len(its_rows) == num_each else its_rows
            orders[worker] = Order(Call(name=name, args=plain_args, kwargs=plain_kwargs, env_ids=chosen))
        values = self._ask(orders, f"call {name!r}")
        return tuple(values[env_id // num_each][env_id % num_each] for env_id in env_ids)

    def set_attr(self, name: str, values: Any, env_ids: Array | None = None) -> None:
        """Set an attribute of each env, or of `env_ids`: all envs of some workers. See EnvPool.set_attr()."""
        _require_name(name)
        num_workers, num_each = self._run.num_workers, self._run.num_envs_per_worker
        chosen = np.arange(num_workers * num_each) if env_ids is None else env_ids
        rows = workers_of(chosen, num_workers, num_each)
        each = values_for(values, len(chosen))
        plain = {
            worker: to_plain([each[row] for row in its_rows.tolist()], "values") for worker, its_rows in rows.items()
        }

        orders = {worker: Order(SetAttr(name=name, values=its_values)) for worker, its_values in plain.items()}
        self._ask(orders, f"set {name!r}")
        for worker, its_values in plain.items():
            self._head.fleet[worker].attributes[name] = its_values
        if env_ids is not None:
            return
        self.attributes.pop(name, None)
        if not isinstance(values, list | tuple):
            self.attributes[name] = plain[0]

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """The states of some envs, in this order."""
        orders = {worker: Order(GetState(env_ids=rows)) for worker, rows in self._rows_of(env_ids).items()}
        values = self._ask(orders, "save the states of envs")
        num_each = self._run.num_envs_per_worker
        return [values[env_id // num_each][env_id % num_each] for env_id in env_ids]

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put some envs back into states. All workers are asked first whether they fit."""
        wrong = next((each for each in states if not isinstance(each, EnvState)), None)
        if wrong is not None:
            raise UsageError(f"states must be what get_state() gave; got {type(wrong).__name__}")
        if len(states) != len(env_ids):
            require_fitting([each.env_name for each in states], (), env_ids)
        by_env = dict(zip(env_ids, states, strict=True))
        checks, orders = {}, {}
        num_each = self._run.num_envs_per_worker
        for worker, rows in self._rows_of(env_ids).items():
            own = [by_env[worker * num_each + row] for row in rows]
            names = [each.env_name for each in own]
            plain = states_to_plain(own)
            try:
                states_from_plain(plain)
            except BadMessage as error:
                raise UsageError(f"states must be what get_state() gave: {error}") from None
            checks[worker] = Order(SetState(env_ids=rows, env_names=names))
            orders[worker] = Order(SetState(env_ids=rows, env_names=names, states=plain))
        self._ask(checks, "restore the states of envs")
        self._ask(orders, "restore the states of envs")

    def _rows_of(self, env_ids: Sequence[int]) -> dict[int, list[int]]:
        """Indices of these envs in the pools of their workers."""
        num_each = self._run.num_envs_per_worker
        rows: dict[int, list[int]] = {}
        for env_id in env_ids:
            rows.setdefault(env_id // num_each, []).append(env_id % num_each)
        return rows

    def _ask(self, orders: Mapping[int, Order], what: str) -> dict[int, list[Any]]:
        """A value for each env of the workers that have an order."""
        run = self._run
        if self._head.has_open_orders:
            raise EnvBusy(
                f"a rollout or stream has been begun: finish the rollout, or close the stream, before you {what}"
            )
        workers = sorted(orders)
        try:
            self._head.issue(orders)
            run.wait_for_answers(workers, self._timeout_s, GIVEN_UP)
        except BaseException:
            self._head.cancel_open()  # or the answers would be taken for those of later orders
            raise
        answers = run.take(workers).take()
        return {
            worker: each.result for worker, each in zip(workers, answers, strict=True) if isinstance(each.result, list)
        }


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        raise UsageError(f"the name of a method or attribute must be text; got {name!r}")
