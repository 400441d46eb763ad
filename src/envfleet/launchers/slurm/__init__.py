"""Start workers as the jobs or job steps of a Slurm cluster."""

from envfleet.launchers.slurm.settings import Slurm

__all__ = ["Slurm"]
