"""Pixels: observations that are images of the env."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.contract.checks import true_or_false, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Observe what `render_mode="rgb_array"` shows: [stack_num, height, width, 3] uint8, the newest image last.

    The first observation of an episode repeats its image `stack_num` times. The result equals that of Gymnasium's
    AddRenderObservation, GrayscaleObservation and FrameStackObservation together.
    """

    height: int | None = 84  # MuJoCo draws at this size, other images are made smaller; None: as the env has it
    width: int | None = 84
    stack_num: int = 3
    grayscale: bool = False  # True: [stack_num, height, width]
    has_effects: bool = True  # False: MuJoCo draws without shadows, reflections and smooth edges; much quicker on a CPU

    def __post_init__(self) -> None:
        """Check the settings; UsageError names the wrong one."""
        for name in ("height", "width", "stack_num"):
            value = getattr(self, name)
            if value is not None or name == "stack_num":
                object.__setattr__(self, name, whole_number(f"{name} of Pixels", value))
        for name in ("grayscale", "has_effects"):
            true_or_false(f"{name} of Pixels", getattr(self, name))
