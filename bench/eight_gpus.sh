#!/usr/bin/env bash
# Compare composable_shard with FSDP2 on a node with eight GPUs: speed, memory and losses of Llama 3.1 8B.
#
#   git clone REPOSITORY && cd composable_shard
#   pip install "torch>=2.11" numpy rich torchao
#   bash bench/eight_gpus.sh                # prints a table, and writes eight_gpus.json and eight_gpus.log
#   bash bench/eight_gpus.sh --help         # options, expected time, the measured modes
#   bash bench/eight_gpus.sh --batch 1      # on GPUs with less than 96 GB
#
# Requirements: Linux, eight NVIDIA GPUs, Python 3.11, and torch 2.11 or later with CUDA. Only the mode `float8` needs
# torchao; without it, pass --skip-unsupported. composable_shard is imported from this checkout and need not be
# installed. PYTHON=/path/to/python chooses the Python. No model or data is downloaded. Ctrl-C stops all processes.
#
# Exit status: 0 if everything of composable_shard ran with the losses of FSDP2, 1 if not, 2 if the environment does not
# meet the requirements.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$(command -v python || command -v python3 || true)}
if ! command -v "${python:-none}" > /dev/null; then
    echo "eight_gpus.sh: no Python found; activate an environment, or pass PYTHON=/path/to/python" >&2
    exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'CHECK'
import sys


def stop(text):
    print("eight_gpus.sh: " + text, file=sys.stderr)
    sys.exit(2)


if sys.version_info < (3, 11):
    stop("%s is Python %d.%d; use 3.11 or later (PYTHON=/path/to/python)" % ((sys.executable,) + sys.version_info[:2]))

from importlib import metadata, util

if missing := [name for name in ("torch", "numpy", "rich") if util.find_spec(name) is None]:
    stop(f"{sys.executable} has no {', '.join(missing)}; run: {sys.executable} -m pip install {' '.join(missing)}")
version = metadata.version("torch")
if tuple(map(int, version.split(".")[:2])) < (2, 11):
    stop(f"torch is {version}; install 2.11 or later")
try:
    import composable_shard
except Exception as error:
    stop(f"cannot import composable_shard with {sys.executable}: {type(error).__name__}: {error}")
CHECK

exec "$python" "$root/bench/eight_gpus.py" "$@"
