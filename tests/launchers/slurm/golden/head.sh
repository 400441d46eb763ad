#!/bin/bash
#SBATCH --job-name=envfleet
#SBATCH --ntasks=5
#SBATCH --cpus-per-task=2
#SBATCH --no-kill

# A learner and its 4 workers in one job: Slurm() starts them with srun.
export ENVFLEET_NUM_CPUS=2
export OMP_NUM_THREADS=2
export OPENBLAS_NUM_THREADS=2
export MKL_NUM_THREADS=2
exec python train.py --name 'it'"'"'s mine'
