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
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
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

say() { echo "$(date '+%F %T') envfleet.slurm learner: $*" >&2; }

# USR1: the time limit is near. TERM: preempted, or cancelled by somebody, or the time limit; usually Slurm tells the
# learner, too, so that it is passed on only if it still runs a while later.
told= to_pass= pass_s=0 is_said= child=
trap 'told=${told:-TERM}; to_pass=TERM; pass_s=$((SECONDS + 5))' TERM INT
trap 'told=USR1; to_pass=USR1; pass_s=$SECONDS; pass' USR1
handles_usr1() {
  local handled
  handled=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$child/status" 2>/dev/null)
  [ -n "$handled" ] && [ $((16#$handled & 0x200)) != 0 ]
}
pass() {
  if [ -z "$child" ] || [ "$SECONDS" -lt "$pass_s" ]; then return; fi
  if [ "$to_pass" = TERM ] || handles_usr1; then
    kill -s "$to_pass" "$child" 2>/dev/null
    to_pass=
  elif [ -z "$is_said" ] && [ "$SECONDS" -ge $((pass_s + 5)) ]; then
    is_said=yes
    say "the time limit is near; it does not handle SIGUSR1 (envfleet.StopSignal)"
  fi
}
pause() {  # seconds; a signal ends it
  sleep "$1" & nap=$!
  wait "$nap"; kill "$nap" 2>/dev/null
}

python train.py </dev/null &
child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ends a wait, too
  if [ -n "$to_pass" ]; then sleep 1; pass; else wait "$child"; code=$?; fi
done
wait "$child" 2>/dev/null; again=$?
case $again in 127 | -1) ;; *) code=$again ;; esac  # -1: bash 5.2, if the learner ended when a signal ended the wait
if [ "$code" != 75 ] || [ -z "$told" ]; then exit "$code"; fi

# It was told to stop, and has saved. A job that Slurm ends, but does not requeue, was cancelled, or its time is over.
job=" $(scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null) "
case $job in
  *" JobState=COMPLETING "*" Restarts=${SLURM_RESTART_COUNT:-0} "*)
    say "it has saved; Slurm ends this job: submit it again to go on"
    exit "$code" ;;
esac
until_s=$((SECONDS + 40))
if [ "$told" = USR1 ]; then
  say "it has saved; the job is requeued, and will go on from there"
  trap - TERM USR1
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "the job was not requeued: submit it again to go on"
    exit "$code"
  fi
else
  say "it has saved; Slurm will end this job, or run it again later"
fi
# A job whose script ends by itself is completed, and would not be requeued: wait to be killed.
while [ "$SECONDS" -lt "$until_s" ]; do pause $((until_s - SECONDS)); done
exit "$code"
