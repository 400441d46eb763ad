"""Start workers as the actors of a Ray cluster."""

from envfleet.launchers.ray.settings import Ray

__all__ = ["Ray"]
