"""Places: the placement groups of a run, with one bundle for each worker, and why Ray has not reserved one yet."""

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

ASK_S = 1.0  # seconds between two questions about placement groups that are not reserved
FIRST_ASK_S = 0.2  # the same, for the first question
CLOSE_S = 2.0  # the most that Ray may take to remove or describe a placement group
PLACE_S = 10.0  # the most that Ray may take to accept a placement group


@dataclass(slots=True, eq=False)
class Group:
    """One placement group. Ray reserves all of its bundles at once, or none."""

    placement_group: Any
    num_bundles: int
    free: list[int]  # bundles without a worker
    is_reserved: bool = False  # at the last look
    is_removed: bool = False  # by others: its workers are gone, and Ray does not restart them
    infeasible_since_s: float | None = None  # since when no node is large enough; None: one is
    detail: str = ""  # why it is not reserved


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a group is not reserved.

    Args:
        detail: The reason, for the user.
        infeasible_s: Seconds since when no node is large enough; 0.0 if one is.
        is_removed: Others have removed the group.
    """

    detail: str
    infeasible_s: float
    is_removed: bool


class Places:
    """Asks Ray for places. A thread of its own asks why they are not reserved yet, because Ray may answer slowly.

    Args:
        session: The connection to Ray.
        bundle: The resources of one worker.
        strategy: The strategy of the placement groups.
    """

    def __init__(self, session: Session, bundle: Mapping[str, float], strategy: str) -> None:
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
        """Return bundles for workers: free ones, and those of a new group, which need not be reserved yet.

        Raises:
            NoAnswer: Ray does not answer.
        """
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
        """Mark a bundle as free."""
        group.free.append(bundle)
        group.free.sort()

    def remove_empty(self) -> None:
        """Remove groups without workers from Ray; if Ray does not answer now, it removes them later."""
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
        """Forget a group that others have removed from the cluster.

        Raises:
            NoAnswer: Ray does not answer.
        """
        from ray.util.placement_group import placement_group_table

        if group in self._groups:
            table = in_time(lambda: placement_group_table(group.placement_group), "placement_group_table()", CLOSE_S)
            if table.get("state") == "REMOVED":
                self._groups.remove(group)

    def close(self) -> None:
        """End the thread and remove all groups; no worker may be left in them."""
        self._is_closing.set()
        with contextlib.suppress(Exception):  # if the cluster is gone, so are the groups
            if self._session.is_alive:
                self.remove_empty()
        self._thread.join(CLOSE_S)

    def watch(self, groups: Iterable[Group]) -> None:
        """Set the groups about which the thread asks."""
        self._watched = tuple(dict.fromkeys(groups))

    def shortage(self, group: Group) -> Shortage | None:
        """Return why a group is not reserved; None if it is, or if the reason is not known."""
        if group.is_reserved or not group.detail:
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
            except Exception as error:  # the cluster may not answer for a while; it is asked again
                if repr(error) != self._last_failure:
                    logger.warning("Ray does not report its resources; it is asked again until it does: %r", error)
                self._last_failure = repr(error)

    def _ask(self, groups: Sequence[Group]) -> None:
        ray = import_ray()
        from ray.util.placement_group import placement_group_table

        nodes = free = None
        for group in groups:
            table = placement_group_table(group.placement_group)
            group.is_reserved = table.get("state") == "CREATED"
            group.is_removed = table.get("state") == "REMOVED"
            if group.is_reserved:
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
    """Return whether no node has the resources of a bundle, even without other work on it."""
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
    """Describe what was asked for, what the cluster has, and what to do.

    Args:
        bundle: The resources of one worker.
        num_bundles: The number of workers in the group.
        strategy: The strategy of the group.
        state: The group's state in Ray's words.
        nodes: The resources of each node.
        free: The free resources of the whole cluster.
        is_too_much: The cluster can never reserve this group as it is.
    """
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
