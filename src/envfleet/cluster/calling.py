"""Calling: methods and attributes of remote envs, asked of workers, all at once, while nothing else is under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envfleet.cluster.messages import Call, SetAttr, ValuesReady
from envfleet.cluster.orders import Expected
from envfleet.cluster.run import Run
from envfleet.cluster.values_wire import to_plain
from envfleet.contract.errors import EnvBusy, UsageError

GIVEN_UP = "The call is given up: envs may still carry it out, but what they return is dropped"

MakeOrder = Callable[[int, int], Any]  # (order, accepted) -> message


class Calling:
    """Calls, and what was set by them."""

    def __init__(self, run: Run, timeout_s: float) -> None:
        """Nothing is set."""
        self._run = run
        self._timeout_s = timeout_s
        self.attributes: dict[str, Any] = {}  # set to one value for all envs, as they travel: new workers get them, too

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What a method of each of `env_ids` returns, or an attribute of it. Only their workers are asked."""
        plain_args, plain_kwargs = to_plain(args, "args"), to_plain(kwargs, "kwargs")
        num_each = self._run.num_envs_per_worker
        rows: dict[int, list[int]] = {}
        for env_id in env_ids:
            rows.setdefault(env_id // num_each, []).append(env_id % num_each)

        def message_for(its_rows: list[int]) -> MakeOrder:
            chosen = None if len(its_rows) == num_each else its_rows
            return lambda order, accepted: Call(
                order=order, accepted=accepted, name=name, args=plain_args, kwargs=plain_kwargs, env_ids=chosen
            )

        values = self._ask({worker: message_for(its_rows) for worker, its_rows in rows.items()}, f"call {name!r}")
        return tuple(values[env_id // num_each][env_id % num_each] for env_id in env_ids)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env: a list or tuple has a value for each, anything else is for all."""
        num_each = self._run.num_envs_per_worker
        num_envs = self._run.num_workers * num_each
        is_for_all = not isinstance(values, list | tuple)
        each = [values] * num_envs if is_for_all else list(values)
        if len(each) != num_envs:
            raise UsageError(f"set_attr() needs a value for each of num_envs={num_envs} envs; got {len(each)}")
        plain = [to_plain(each[first : first + num_each], "values") for first in range(0, num_envs, num_each)]

        def message_with(its_values: Any) -> MakeOrder:
            return lambda order, accepted: SetAttr(order=order, accepted=accepted, name=name, values=its_values)

        self._ask({worker: message_with(its_values) for worker, its_values in enumerate(plain)}, f"set {name!r}")
        for desk, its_values in zip(self._run.head.desks, plain, strict=True):
            desk.attributes[name] = its_values
        self.attributes.pop(name, None)
        if is_for_all:
            self.attributes[name] = plain[0]

    def _ask(self, messages: Mapping[int, MakeOrder], what: str) -> dict[int, list[Any]]:
        """A value for each env of the workers that have a message."""
        run = self._run
        if run.head.has_open_orders:
            raise EnvBusy(
                f"a rollout or stream has been begun: finish the rollout, or close the stream, before you {what}"
            )
        workers = sorted(messages)
        try:
            run.head.issue({worker: (messages[worker], {}) for worker in workers}, Expected(ValuesReady))
            run.wait_for_answers(workers, self._timeout_s, GIVEN_UP)
        except BaseException:
            run.head.cancel_open()  # or the answers would be taken for others
            raise
        answers = run.take(workers).take()
        return {
            worker: each.result for worker, each in zip(workers, answers, strict=True) if isinstance(each.result, list)
        }
