#!/bin/bash
#@options

# A distributed training for Slurm, as `hvdcomp launch slurm --dry-run` prints it. Submit it with sbatch.
#
# Slurm warns this script before the time limit (the option --signal) and when it preempts the job. The ranks then save
# a checkpoint, all of the same step, and end with the code below; the job is queued again and goes on from there.

: "${SLURM_JOB_ID:?this is a batch script: submit it with sbatch}"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  # They would all write to the same files, and one that is queued again may take the whole array with it.
  echo "job $SLURM_JOB_ID: this script is one job, not an array: submit it once for each job, without --array"
  exit 2
fi
#@modules

# How many ranks there must be: one that finds fewer others stops with the reason.
export HVDCOMP_EXPECTED_SIZE="$SLURM_NTASKS"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export PYTHONUNBUFFERED=1
# InfiniBand needs memory that is locked. Slurm brings the login node's limit along: take all that this node allows.
ulimit -S -l hard
#@torch
#@environment

# The program, one argument a line: nothing in it is read by a shell again.
command=(
#@command
)

# One word for the whole of it, as mpirun reads options in a program's arguments too.
#@program

# What starts it on all ranks. A program that takes no notice of the warning is not ended by it.
#@launch

#@constants
echo "job $SLURM_JOB_ID: $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"

# A signal ends `wait` before the launcher has ended: then wait again. srun and mpirun pass SIGUSR1 on to all ranks, but
# at SIGTERM they kill them. They are warned again and again: a program that is only just starting takes no notice yet.
signals=0
launcher=
repeating=
warn() {
  signals=$((signals + 1))
  kill -USR1 "$launcher" 2>/dev/null
  if [ -z "$repeating" ]; then
    (while sleep 15 && kill -USR1 "$launcher" 2>/dev/null; do :; done) &
    repeating=$!
  fi
}
trap warn USR1 TERM
"${launch[@]}" &
launcher=$!
while :; do
  before=$signals
  wait "$launcher"
  code=$?
  [ "$signals" = "$before" ] && break
done
[ -n "$repeating" ] && kill "$repeating" 2>/dev/null
#@code

if [ "$code" = "$saved" ] && [ "$max_requeues" -gt 0 ]; then
  # A job that was cancelled is no longer RUNNING, and stays so.
  if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ]; then
    echo "job $SLURM_JOB_ID: saved; it was cancelled and is not queued again"
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
    echo "job $SLURM_JOB_ID: saved, but queued again $SLURM_RESTART_COUNT times already (max_requeues): it stays ended"
  else
    echo "job $SLURM_JOB_ID: saved; it is queued again and goes on from there"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
echo "job $SLURM_JOB_ID: the ranks ended with exit code $code"
exit "$code"
