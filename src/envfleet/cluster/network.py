"""Network: where the head of a cluster listens, and how rollouts and weights travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envfleet.contract.checks import whole_number
from envfleet.contract.errors import UsageError
from envfleet.contract.settings import keep_plain_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where the head of a cluster listens, and how rollouts and weights travel.

    Attributes:
        address: Where the head listens: "ipc" (the default if all workers run on this machine) or "tcp://host:port",
            always encrypted; port 0 takes a free one. Default None: with workers on other machines, the address of
            this machine that is on the way to them.
        head_address: Where workers find the head, if that is another address; default None.
        compression: "zstd" packs images (extra `envfleet[zstd]`); default None.
        weights_dtype: "bfloat16": weights travel with half their bits, and the workers act with those; those of
            evaluations travel whole, so that their results are the learner's own. Default None.
        credit: Number of rollouts that a worker may be ahead of the learner in `stream()`; default 2.
    """

    address: str | None = None
    head_address: str | None = None
    compression: Literal["zstd"] | None = None
    weights_dtype: Literal["bfloat16"] | None = None
    credit: int = 2

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        keep_plain_numbers(self)
        if self.compression not in (None, "zstd"):
            raise UsageError(f"compression must be None or 'zstd'; got {self.compression!r}")
        if self.weights_dtype not in (None, "bfloat16"):
            raise UsageError(f"weights_dtype must be None or 'bfloat16'; got {self.weights_dtype!r}")
        whole_number("credit", self.credit)
