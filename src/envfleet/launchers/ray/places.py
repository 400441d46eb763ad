"""Places: the placement groups of a run, with a bundle for each worker; and why one is not there yet."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.launchers.ray.session import NoAnswer, Session, import_ray, in_time

logger = logging.getLogger("envfleet.ray")

ASK_S = 1.0
FIRST_ASK_S = 0.2
CLOSE_S = 2.0
PLACE_S = 10.0


@dataclass(slots=True, eq=False)
class Group:
    """One placement group. Ray gives all of its bundles at once, or none."""

    placement_group: Any
    num_bundles: int
    free: list[int]  # bundles without a worker
    is_there: bool = False  # all bundles are reserved, as far as is known
    is_removed: bool = False  # by somebody else: what was there is gone, and does not come back
    infeasible_since_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a group is not there."""

    detail: str
    infeasible_s: float  # for so long no node was large enough
    is_removed: bool


class Places:
    """Asks Ray for places, and, in a thread of its own, why they do not come: the cluster may be slow to answer."""

    def __init__(self, session: Session, bundle: Mapping[str, float], strategy: str) -> None:
        """Nothing is asked for yet."""
        self._session = session
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._groups: list[Group] = []
        self._watched: tuple[Group, ...] = ()
        self._is_closing = threading.Event()
        self._last_failure = ""
        self._thread = threading.Thread(target=self._run, name="envfleet-ray", daemon=True)
        self._thread.start()

    def take(self, num_places: int) -> list[tuple[Group, int]]:
        """Bundles that are free, and a new group for the others. Does not wait for it."""
        found: list[tuple[Group, int]] = []
        for group in self._groups:
            while group.free and len(found) < num_places:
                found.append((group, group.free.pop(0)))
        num_missing = num_places - len(found)
        if num_missing:
            import_ray()
            from ray.util.placement_group import placement_group, remove_placement_group

            bundles = [dict(self._bundle) for _ in range(num_missing)]
            try:
                placed = in_time(
                    lambda: placement_group(bundles, strategy=self._strategy),
                    "placement_group()",
                    PLACE_S,
                    remove_placement_group,
                )
            except BaseException:
                for place in found:
                    self.give_back(*place)
                raise
            group = Group(placed, num_missing, [])
            self._groups.append(group)
            self._watched = (*self._watched, group)
            found += [(group, bundle) for bundle in range(num_missing)]
        return found

    def give_back(self, group: Group, bundle: int) -> None:
        """No worker is there any more."""
        group.free.append(bundle)
        group.free.sort()

    def remove_empty(self) -> None:
        """Give groups back to Ray that have no workers. If Ray does not answer now, it gets them when it does."""
        from ray.util.placement_group import remove_placement_group

        empty = [group for group in self._groups if len(group.free) == group.num_bundles]
        if not empty:
            return
        self._groups = [group for group in self._groups if group not in empty]

        def remove() -> None:
            for group in empty:
                remove_placement_group(group.placement_group)

        try:
            in_time(remove, "remove_placement_group()", CLOSE_S)
        except NoAnswer as error:
            logger.warning("%s", error)

    def forget_if_removed(self, group: Group) -> None:
        """Somebody else may have removed it from the cluster: then it is no place any more. Raises NoAnswer."""
        from ray.util.placement_group import placement_group_table

        if group in self._groups:
            table = in_time(lambda: placement_group_table(group.placement_group), "placement_group_table()", CLOSE_S)
            if table.get("state") == "REMOVED":
                self._groups.remove(group)

    def close(self) -> None:
        """Give all back, which must be empty."""
        self._is_closing.set()
        with contextlib.suppress(Exception):  # the cluster may be gone, and with it the groups
            if self._session.is_alive:
                self.remove_empty()
        self._thread.join(CLOSE_S)

    def watch(self, groups: Iterable[Group]) -> None:
        """These are waited for: find out why."""
        self._watched = tuple(dict.fromkeys(groups))

    def shortage(self, group: Group) -> Shortage | None:
        """None: it is there, or nothing is known."""
        if group.is_there or not group.detail:
            return None
        since_s = group.infeasible_since_s
        infeasible_s = 0.0 if since_s is None else time.monotonic() - since_s
        return Shortage(group.detail, infeasible_s, group.is_removed)

    def _run(self) -> None:
        wait_s = FIRST_ASK_S
        while not self._is_closing.wait(wait_s):
            wait_s = ASK_S
            try:
                if self._watched and self._session.is_alive:
                    self._ask(self._watched)
                self._last_failure = ""
            except Exception as error:  # the cluster may be away for a while; it is asked again
                if repr(error) != self._last_failure:
                    logger.warning("Ray does not say how it is with its resources: %r", error)
                self._last_failure = repr(error)

    def _ask(self, groups: Sequence[Group]) -> None:
        ray = import_ray()
        from ray.util.placement_group import placement_group_table

        nodes = free = None
        for group in groups:
            table = placement_group_table(group.placement_group)
            group.is_there = table.get("state") == "CREATED"
            group.is_removed = table.get("state") == "REMOVED"
            if group.is_there:
                group.infeasible_since_s = None
                continue
            if nodes is None:
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                free = ray.available_resources()
            is_too_large = is_infeasible(self._bundle, nodes)
            if is_too_large or table.get("stats", {}).get("scheduling_state") == "INFEASIBLE":
                group.infeasible_since_s = group.infeasible_since_s or time.monotonic()
            else:
                group.infeasible_since_s = None
            state = str(table.get("state", "not known"))
            is_too_much = group.infeasible_since_s is not None
            group.detail = shortage_words(
                self._bundle, group.num_bundles, self._strategy, state, nodes, free or {}, is_too_much
            )


def is_infeasible(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether no node has so much, even if nothing else ran there."""
    return not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes)


def shortage_words(
    bundle: Mapping[str, float],
    num_bundles: int,
    strategy: str,
    state: str,
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
    is_too_much: bool,
) -> str:
    """What was asked, what there is, what to do."""
    names = list(bundle)
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
    largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in names}
    text = (
        f"Ray placement group is {state}: {num_bundles} x ({_amounts(bundle, names)}) asked for, {strategy}; "
        f"the cluster has {len(nodes)} nodes with {_amounts(total, names)} in all, {_amounts(largest, names)} at most "
        f"on one, and {_amounts(free, names)} free"
    )
    if is_too_much:
        text += (
            ". This never fits: ask for less (cpus_per_worker, gpus_per_worker, resources, placement, num_workers), "
            "or add nodes with `ray start --address=...`"
        )
    return text


def _amounts(amounts: Mapping[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
