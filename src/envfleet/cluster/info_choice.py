"""InfoChoice: which infos a rollout carries, and which of them masks the policy's actions. Orders say it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from envfleet.contract.errors import UsageError
from envfleet.policies.action_masks import checked_key

# Numbers of all keys, with their masks, that one worker's rollout carries if no keys were chosen.
MOST_INFO_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class InfoChoice:
    """What of the envs' infos a rollout carries."""

    keys: tuple[str, ...] | None = None  # None: all
    has_objects: bool = False  # values that are no numbers, too, and of any size; else MOST_INFO_BYTES of numbers
    action_mask: str | None = None  # the key of the mask that the policy gets with each observation

    @classmethod
    def of(cls, infos: Sequence[str] | None, action_mask: str | None) -> InfoChoice:
        """Check the arguments of rollout() and stream().

        Args:
            infos: Keys, or None for all plain numeric ones.
            action_mask: A key, or None.

        Returns:
            The choice.

        Raises:
            UsageError: One of them is neither.
        """
        key = checked_key(action_mask)
        if infos is None:
            return NUMBERS if key is None else cls(action_mask=key)
        is_keys = isinstance(infos, Collection) and all(isinstance(key, str) for key in infos)
        if isinstance(infos, str) or not is_keys:
            raise UsageError(f"infos must be a tuple of keys, such as ('success', 'distance'), or None; got {infos!r}")
        return cls(tuple(dict.fromkeys(infos)), True, key)


NUMBERS = InfoChoice()  # the default: orders leave it out
ALL_INFOS = InfoChoice(has_objects=True)  # as Gymnasium's vector envs return them
