"""Start workers as the jobs or job steps of a Slurm cluster."""
