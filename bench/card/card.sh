#!/usr/bin/env bash
# What to run when a card is at hand for a quarter of an hour. From the root of the repository:
#
#     bash bench/card/card.sh check | bench | compiled         (each within ten minutes)
#
# *check* measures no time: its parts run side by side, and take five minutes. `make` is not used, for it makes an
# environment and installs torch: this takes the torch that is there ($PYTHON), with numpy, pytest, pytest-timeout,
# pytest-xdist, expecttest, rich and matplotlib, and bitsandbytes for some cases; it needs no network. What each part
# printed is kept in $OUT/logs, figures in $OUT/results, and all is packed into $OUT/results.tgz. The exit status is 1 if
# anything failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 TORCHINDUCTOR_COMPILE_THREADS=4
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/runs/card}
RESULTS=$OUT/results
mkdir -p "$RESULTS" "$OUT/logs"
rm -f "$OUT/failed"

# lap NAME SECONDS COMMAND...: runs it within that time; says how it ended.
lap() {
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    timeout -k 5 "$limit" "$@" >"$OUT/logs/$name.txt" 2>&1
    status=$?
    echo "== $name: exit status $status, $((SECONDS - begin)) s"
    [ "$status" = 0 ] || echo "$name" >>"$OUT/failed"
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
TESTS=("$PYTHON" -m pytest -c /dev/null "--rootdir=$PWD" -p no:cacheprovider -q -ra --timeout=200)
BENCH=("$PYTHON" bench/run_all.py --device cuda)

case ${1:-check} in
check)
    about 2>&1 | tee "$OUT/logs/about.txt" || echo about >>"$OUT/failed"
    (
        lap decoders 230 "$PYTHON" bench/card/decoders.py --jobs 6 --limit 220
        lap faults 90 "$PYTHON" bench/card/decoders.py --faults --limit 80
    ) &
    lap tests 240 "${TESTS[@]}" -n 4 tests/comm/test_streams.py tests/training/test_cuda.py &
    (
        lap stress 90 "$PYTHON" bench/card/card_probe.py stress
        lap counts 90 "$PYTHON" bench/card/card_probe.py counts
        lap sanitizer 90 env TORCH_CUDA_SANITIZER=1 WIDTH=64 "$PYTHON" bench/card/card_probe.py stress
    ) &
    (
        lap memory-1b 200 "${BENCH[@]}" --only memory-1b --results "$RESULTS"
        lap memory 100 "${BENCH[@]}" --only memory --results "$RESULTS"
    ) &
    lap overhead 280 "${BENCH[@]}" --only overhead,overhead-per-group --results "$RESULTS" &
    wait
    ;;
bench)
    for batch in 8 32; do
        for transport in direct packed; do
            lap "step-$batch-$transport" 90 env COMPOSABLE_SHARD_TRANSPORT=$transport "$PYTHON" bench/step.py --sizes 1b \
                --device cuda --dtype bfloat16 --batch $batch --rounds 10 --engines ours,fsdp2,fsdp2-again,compute \
                --json "$RESULTS/step-1b-batch$batch-$transport-cuda.json"
        done
    done
    ;;
compiled)
    lap compile 280 "${BENCH[@]}" --only compile --results "$RESULTS"
    lap figures 250 "${BENCH[@]}" --only figures --results "$RESULTS"
    ;;
*)
    echo "card.sh: check, bench or compiled, not $1" >&2
    exit 2
    ;;
esac
for name in $(cat "$OUT/failed" 2>/dev/null); do
    echo "== $name failed"
    tail -n 25 "$OUT/logs/$name.txt" | cut -c1-400
done
cat "$OUT"/logs/*.txt | grep -E "^(real|stress|fault) |per group" | cut -c1-300
tar czf "$OUT/results.tgz" -C "$OUT" results logs
[ ! -e "$OUT/failed" ]
