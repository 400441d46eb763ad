"""TaskClocks: what parent and children tell each other about the time of the task that each child is at work on.

When a child took its task is in the task queues, and costs nothing here. The words below change only when an env has
failed, or takes longer than it may.
"""

from __future__ import annotations

_WORDS = 3  # for each child


class TaskClocks:
    """Times of CLOCK_MONOTONIC in shared memory, one of each kind for each child."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` has `required_bytes`, and zeros at first."""
        words = memory.cast("d")
        num_children = len(words) // _WORDS
        self.renewed_s = words[:num_children]  # child: the time of its task counts from here, if that is later
        self.is_building = words[num_children : 2 * num_children]  # child, 0 or 1: it builds an env within a task
        self.given_up_s = words[2 * num_children :]  # parent: the task that the child took before this is to end

    @staticmethod
    def required_bytes(num_children: int) -> int:
        """The size of the memory."""
        return 8 * _WORDS * num_children
