#!/bin/bash
#SBATCH --job-name=walker_2.1
#SBATCH --array=0
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --output=/home/me/logs/worker-%a.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

# Element N of this array is worker N of an EnvFleet run. The keys of the run are in the job's environment.
export ENVFLEET_NUM_CPUS=1
export OMP_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export MKL_NUM_THREADS=1

say() { echo "$(date '+%F %T') envfleet.slurm worker $SLURM_ARRAY_TASK_ID: $*" >&2; }

# TERM: preempted, or cancelled by somebody. USR1: the time limit is near. USR2: the head wants no worker here any more.
told= over= child=
tell() { told=$1; if [ -n "$child" ]; then kill -s "$1" "$child" 2>/dev/null; fi; }
trap 'tell TERM' TERM INT
trap 'tell USR1' USR1
trap 'over=yes; tell TERM' USR2

run_worker() {  # sets code
  /opt/python/bin/python -m envfleet.cluster.worker --head tcp://HEAD:PORT --silence-s 30 --worker "$SLURM_ARRAY_TASK_ID" </dev/null &
  child=$!
  if [ -n "$told" ]; then kill -s "$told" "$child" 2>/dev/null; fi
  wait "$child"; code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done  # a signal ends a wait, too
  wait "$child" 2>/dev/null; again=$?
  if [ "$again" != 127 ]; then code=$again; fi
  child=
}

pause() {  # seconds; a signal ends it
  sleep "$1" & nap=$!
  wait "$nap"; kill "$nap" 2>/dev/null
}

num_crashes=0
while [ -z "$over" ]; do
  started=$SECONDS
  run_worker
  case $code in 0 | 3 | 5) exit 0 ;; esac
  if [ -n "$over" ] || [ "$told" = USR1 ]; then exit 0; fi
  if [ "$code" = 4 ] || [ "$told" = TERM ]; then
    # A job whose script ends by itself is completed, and would not be requeued: wait to be killed.
    say "it was told to leave; Slurm will end this job, or run it again later"
    until_s=$((SECONDS + 40))
    while [ -z "$over" ] && [ "$SECONDS" -lt "$until_s" ]; do pause $((until_s - SECONDS)); done
    told=
    continue
  fi
  if [ $((SECONDS - started)) -ge 20 ]; then num_crashes=0; fi
  num_crashes=$((num_crashes + 1))
  if [ "$num_crashes" -gt 3 ]; then
    say "it ended with code $code, and too often: given up"
    exit "$code"
  fi
  say "it ended with code $code; it is started again here"
  pause $((1 << (num_crashes - 1)))
done
exit 0
