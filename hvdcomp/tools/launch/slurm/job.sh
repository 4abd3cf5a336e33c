#!/bin/bash
#@options

# A distributed training job for Slurm, printed by `hvdcomp launch slurm --dry-run`. Submit it with sbatch.
#
# Slurm signals this script before the time limit (the option --signal) and when it preempts the job. The ranks then
# save a checkpoint of the same step, and exit with the code below. The job is requeued and continues from there.

: "${SLURM_JOB_ID:?this is a batch script: submit it with sbatch}"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  # All tasks of an array would write to the same files, and a requeued task may requeue the whole array.
  echo "job $SLURM_JOB_ID: this script is one job, not an array: submit it once for each job, without --array"
  exit 2
fi
#@modules

# If sbatch is called inside another job, it passes on the variables of that job. srun would use them for the cores and
# memory of this job.
unset "${!SLURM_CPU_BIND@}"
[ -n "${SLURM_MEM_PER_NODE:-}" ] && unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU

# The expected number of ranks: training with a different number stops with an error.
export HVDCOMP_EXPECTED_SIZE="$SLURM_NTASKS"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export PYTHONUNBUFFERED=1
# InfiniBand needs locked memory. Slurm copies the limit of the login node, so raise it to the limit of this node.
ulimit -S -l hard
#@torch
#@environment

# The program, with one argument per line. No shell interprets it again.
command=(
#@command
)

# The whole program as one word, because mpirun would interpret a program's arguments as its own options.
#@program

# The command that starts the program on all ranks. A program that ignores the warning (SIGUSR1) is not ended by it.
#@launch

#@constants
echo "job $SLURM_JOB_ID: $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"

# A signal ends `wait` before the launcher has ended, so wait again. srun and mpirun pass SIGUSR1 to all ranks, but
# kill them on SIGTERM. The warning is repeated, because a program that is still starting ignores it.
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

# Slurm's controller may not answer for some minutes. Slurm would also requeue a canceled job, so only a job that is
# known to be RUNNING is requeued.
requeue() {
  local state asked=
  for _ in {1..20}; do
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [ -n "$state" ] && [ "$state" != RUNNING ]; then
      echo "job $SLURM_JOB_ID: the ranks saved a checkpoint; the job was cancelled, so it is not requeued"
      return
    elif [ -n "$state" ]; then
      # Printed before the requeue, because Slurm may kill this script at once.
      [ -n "$asked" ] || echo "job $SLURM_JOB_ID: the ranks saved a checkpoint; Slurm is asked to requeue the job," \
        "which then continues from this checkpoint"
      asked=yes
      scontrol requeue "$SLURM_JOB_ID" && return
    fi
    sleep 15
  done
  echo "job $SLURM_JOB_ID: the ranks saved a checkpoint, but Slurm did not requeue the job: submit it again to" \
    "continue from this checkpoint"
}
if [ "$code" = "$saved" ] && [ "$max_requeues" -gt 0 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
    echo "job $SLURM_JOB_ID: the ranks saved a checkpoint, but the job was already requeued $SLURM_RESTART_COUNT times" \
      "(max_requeues), so it is not requeued"
  else
    requeue
  fi
fi
echo "job $SLURM_JOB_ID: the ranks ended with exit code $code"
exit "$code"
