#!/bin/bash
#
# One long run in sessions of at most INGOT_MAX_RUNTIME seconds, begun again after every end that is not the last one:
#
#   RUN=runs/long CONFIG=config.yaml examples/loop.sh [--section.key value ...]
#
# It goes on after a kill or a crash, unless the session took no step. It ends when the run is complete, when repeating cannot help
# (exit codes 2, 3 and 4), and when somebody stopped the run: by Ctrl-C, by a signal or by `ingot stop RUN`.
set -u
: "${RUN:?the run folder}" "${CONFIG:?a file of settings}"

field() { # one field of what `ingot status` says of the run
    ingot status "$RUN" --json 2>/dev/null |
        python3 -c 'import json, sys; print(json.load(sys.stdin)[0][sys.argv[1]])' "$1" 2>/dev/null || echo none
}

while true; do
    step=$(field step)
    ingot train --config "$CONFIG" --training.output_dir "$RUN" --nproc-per-node "${GPUS:-1}" --stop-exit-code 75 "$@"
    code=$?
    case $code in
    0 | 2 | 3 | 4 | 130) exit "$code" ;;
    75) [ "$(field stop_reason)" = walltime ] || exit "$code" ;;
    esac
    if [ "$(field step)" = "$step" ]; then
        echo "the session took no step beyond $step; the loop ends" >&2
        exit "$code"
    fi
    sleep "${PAUSE:-10}"
done
