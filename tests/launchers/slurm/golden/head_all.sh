#!/bin/bash
#SBATCH --job-name=envfleet
#SBATCH --ntasks=17
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=2097152K
#SBATCH --gpus-per-task=a100:2
#SBATCH --time=1-12:00
#SBATCH --partition=gpu,cpu
#SBATCH --account=lab-7
#SBATCH --qos=high
#SBATCH --constraint='[rack1|rack2]&ib'
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --exclude=node7,node8
#SBATCH --comment='the learner'"'"'s; not mine'
#SBATCH --nice=100
#SBATCH --spread-job

# A learner and its 16 workers in one job: Slurm() starts them with srun.
export ENVFLEET_NUM_CPUS=8
export OMP_NUM_THREADS=8
export OPENBLAS_NUM_THREADS=8
export MKL_NUM_THREADS=8
module load cuda  # the newest
if [ $? != 0 ]; then echo 'envfleet.slurm: this line of setup failed: module load cuda  # the newest' >&2; exit 1; fi
export GREETING='it is'
if [ $? != 0 ]; then echo 'envfleet.slurm: this line of setup failed: export GREETING='"'"'it is'"'"'' >&2; exit 1; fi
exec python train.py
