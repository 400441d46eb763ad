"""AleSaver: saves ALE with what its own clone leaves out: the action that a sticky frame repeats.

ALE does not show that action. So a saver of a sticky game keeps a clone from some frames ago, and the buttons that were
pressed since: pressed again, they lead to the same state, once a frame among them was not sticky. The clone is so old
that all of them were sticky with a chance of less than NEVER.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

NEVER = 1e-12
LEAST_FRAMES = 240  # between two clones: one takes about as long as a frame

# For ale_py's own env; ours has a saver.
WHY_NOT_STICKY = (
    "ALE's clone leaves out the action that sticky frames repeat. Use the id of the game, such as 'ALE/Pong-v5', which "
    "means EnvFleet's env: that one can be saved; or build it with repeat_action_probability=0"
)


class AleSaver:
    """Says what ALE's state is, at any time between two presses of a button."""

    def __init__(self, ale: Any, repeat_action_probability: float) -> None:
        """Save `ale`; begin() says when a game starts, pressed() when a button was pressed."""
        self._ale = ale
        chance = repeat_action_probability
        self._least_frames = 0
        if chance > 0.0:
            self._least_frames = max(LEAST_FRAMES, math.ceil(math.log(NEVER) / math.log(chance)))
        self._presses: list[tuple[int, int]] = []  # since `_base`: the button, and the number of the last frame
        self._base: Any = None  # a clone; None: no frame is sticky, so a clone is enough at any time
        self._next_base: Any = None  # a later one, which is not old enough
        self._next_frame = self._num_presses_before = 0  # when that one was made

    def begin(self) -> None:
        """A game was started: ALE repeats no action of the one before."""
        if self._least_frames:
            self._presses = []
            self._base = self._ale.cloneState(include_rng=True)
            self._make_next_base()

    def pressed(self, button: int) -> None:
        """A button was pressed for one or several frames."""
        if not self._least_frames:
            return
        frame: int = self._ale.getFrameNumber()
        self._presses.append((button, frame))
        if frame - self._next_frame >= self._least_frames:
            self._base, self._presses = self._next_base, self._presses[self._num_presses_before :]
            self._make_next_base()

    def save(self) -> tuple[bytes, list[tuple[int, int]]]:
        """The state, in plain values."""
        base = self._base if self._least_frames else self._ale.cloneState(include_rng=True)
        return zlib.compress(base.serialize(), 1), list(self._presses)

    def restore(self, base: bytes, presses: list[tuple[int, int]]) -> None:
        """Put ALE, with the same game, into a state that save() gave."""
        ale = self._ale
        if self._least_frames:
            ale.reset_game()  # so that no action is repeated
        restore_clone(ale, zlib.decompress(base))
        self.begin()
        for button, last_frame in presses:
            while ale.getFrameNumber() < last_frame:
                ale.act(button)
            self.pressed(button)

    def _make_next_base(self) -> None:
        self._next_base = self._ale.cloneState(include_rng=True)
        self._next_frame, self._num_presses_before = self._ale.getFrameNumber(), len(self._presses)


def restore_clone(ale: Any, clone: bytes) -> None:
    """Put ALE into the state of a serialized clone."""
    import ale_py

    ale.restoreState(ale_py.ALEState(clone))


def is_ale_env(env: Any) -> bool:
    """Is it ale_py's own Gymnasium env?"""
    return type(env).__module__ == "ale_py.env" and hasattr(env, "ale")


def is_sticky(env: Any) -> bool:
    """Does an env of ale_py repeat actions by chance?"""
    return float(env.ale.getFloat("repeat_action_probability")) > 0.0


def ale_clone(env: Any) -> bytes:
    """The state of an env of ale_py, whose frames are not sticky."""
    clone: bytes = env.ale.cloneState(include_rng=True).serialize()
    return clone
