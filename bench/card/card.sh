#!/usr/bin/env bash
# What to run when a card is at hand for half an hour. From the root of the repository:
#
#     bash bench/card/card.sh check | bench1 | bench2 | compiled        (each within ten minutes)
#
# `make` is not used, for it makes an environment and installs torch: this takes the torch that is there ($PYTHON), with
# numpy, pytest, pytest-timeout, pytest-xdist, rich and matplotlib, and needs no network. What is printed is kept in
# $OUT/log.txt, figures in $OUT/results, and both packed into $OUT/results.tgz. The exit status is 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/bench" NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/runs/card}
RESULTS=$OUT/results
LOG=$OUT/log.txt
FAILED=0
mkdir -p "$RESULTS"

# lap SECONDS COMMAND...: runs it within that time; says how it ended.
lap() {
    local limit=$1 begin=$SECONDS status
    shift
    echo "== $*" | tee -a "$LOG"
    timeout -k 5 "$limit" "$@" >>"$LOG" 2>&1
    status=$?
    echo "   exit status $status, $((SECONDS - begin)) s" | tee -a "$LOG"
    [ "$status" = 0 ] || { FAILED=1; tail -25 "$LOG"; }
}

about() {
    "$PYTHON" - <<'PROGRAM'
import importlib
import sys

import torch

print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(), "nccl", torch.cuda.nccl.version())
for name in "numpy pytest pytest_timeout xdist rich matplotlib composable_shard".split():
    try:
        print(name, getattr(importlib.import_module(name), "__version__", ""))
    except Exception as error:
        print(name, "MISSING", error)
PROGRAM
}

# The settings in pyproject.toml ask for the versions of its own environment, and take every warning for an error.
TESTS=("$PYTHON" -m pytest -c /dev/null "--rootdir=$PWD" -p no:cacheprovider -q -ra)
BENCH=("$PYTHON" bench/run_all.py --device cuda)

case ${1:-check} in
check)
    about 2>&1 | tee -a "$LOG" || FAILED=1
    lap 60 "${TESTS[@]}" tests/comm/test_streams.py
    lap 240 "${TESTS[@]}" -n 4 tests/training/test_cuda.py
    lap 150 "$PYTHON" bench/card/decoders.py --jobs 4 --limit 140
    lap 90 "$PYTHON" bench/card/card_probe.py stress
    lap 120 "$PYTHON" bench/card/card_probe.py counts
    lap 60 env TORCH_CUDA_SANITIZER=1 WIDTH=64 "$PYTHON" bench/card/card_probe.py stress
    ;;
bench1)
    lap 60 "${BENCH[@]}" --smoke --only step --results "$OUT/smoke"
    lap 300 "${BENCH[@]}" --only step --results "$RESULTS"
    for transport in direct packed; do
        lap 80 env COMPOSABLE_SHARD_TRANSPORT=$transport "$PYTHON" bench/step.py --device cuda --sizes 1b --dtype bfloat16 \
            --batch 32 --rounds 10 --engines ours,fsdp2,fsdp2-again,compute --json "$RESULTS/step-$transport.json"
    done
    ;;
bench2)
    lap 200 "${BENCH[@]}" --only overhead,overhead-per-group --results "$RESULTS"
    lap 150 "${BENCH[@]}" --only memory-1b --results "$RESULTS"
    lap 150 "${BENCH[@]}" --only memory --results "$RESULTS"
    ;;
compiled)
    lap 280 "${BENCH[@]}" --only compile --results "$RESULTS"
    lap 250 "${BENCH[@]}" --only figures --results "$RESULTS"
    ;;
*)
    echo "card.sh: check, bench1, bench2 or compiled, not $1" >&2
    exit 2
    ;;
esac
grep -E "^(real|stress|step|overhead|memory|compile|figures)|per group|losses" "$LOG" | tail -40
tar czf "$OUT/results.tgz" -C "$OUT" results log.txt
exit $FAILED
