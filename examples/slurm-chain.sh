#!/bin/bash
#SBATCH --job-name=ingot
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#
# One long run as a chain of short jobs:
#
#   RUN=runs/long CONFIG=config.yaml sbatch examples/slurm-chain.sh [--section.key value ...]
#
# Ingot saves and stops before SLURM_JOB_END_TIME and ends with 75. The next job is submitted at the start of this one and begins
# only if this one does not end with 0, so the chain goes on after a kill, a timeout or a lost node too. It ends when the run is
# complete, when repeating cannot help (exit codes 2, 3 and 4), when a job took no step, when JOBS_LEFT of them have run, or when
# somebody calls `ingot stop RUN`.
set -u
: "${RUN:?the run folder}" "${CONFIG:?a file of settings}"
jobs_left=${JOBS_LEFT:-100}
script=${SCRIPT:-$0}

field() { # one field of what `ingot status` says of the run
    ingot status "$RUN" --json 2>/dev/null |
        python3 -c 'import json, sys; print(json.load(sys.stdin)[0][sys.argv[1]])' "$1" 2>/dev/null || echo none
}

step=$(field step)
if [ "$step" = "${STEP_BEFORE:-at the start}" ]; then
    echo "the job before this one took no step, see its log; the chain ends at step $step" >&2
    exit 1
fi

next=
if [ "$jobs_left" -gt 1 ]; then
    next=$(sbatch --parsable --dependency="afternotok:$SLURM_JOB_ID" --kill-on-invalid-dep=yes \
        --export="ALL,JOBS_LEFT=$((jobs_left - 1)),STEP_BEFORE=$step" "$script" "$@") || exit 1
fi

ingot train --config "$CONFIG" --training.output_dir "$RUN" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --stop-exit-code 75 "$@" &
train=$!
trap 'kill -TERM "$train"; signalled=yes' TERM USR1 # a job that is to make room, or `scancel --signal=USR1 --batch`
signalled=no
wait "$train"
code=$?
while [ "$signalled" = yes ]; do # a signal ends the wait before the run has saved
    signalled=no
    wait "$train"
    code=$?
done

case $code in
0 | 2 | 3 | 4) over=yes ;;
75) [ "$(field stop_reason)" = stop_file ] && over=yes ;;
esac
if [ -n "$next" ] && [ "${over:-no}" = yes ]; then
    scancel "$next"
fi
exit "$code"
