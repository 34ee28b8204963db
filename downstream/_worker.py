"""List, run and judge the rows of a file, inside the environment that the file requires.

    python _worker.py list FILE                         # print the rows and versions as JSON
    python _worker.py torch|ours FILE FOLDER INDEX...   # run rows with one implementation
    python _worker.py judge FILE FOLDER INDEX...        # print the verdicts as JSON

The libraries are imported once. Each rank of each row is a fork of this process, which has not used a process group or
a thread pool. The recorded values, errors and output of the ranks are stored in FOLDER/torch/INDEX and
FOLDER/ours/INDEX.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from _load import load
from _rows import OURS, TORCH, Row, Run


def main() -> None:
    task, path, *rest = sys.argv[1:]
    if task == OURS:
        import composable_shard

        composable_shard.install()
    rows = load(Path(path))
    if task == "list":
        versions = {name: metadata.version(name) for name in rows.versions}
        print(json.dumps({"versions": versions, "rows": [(row.title, row.timeout) for row in rows.all]}))
        return
    folder, indices = Path(rest[0]), [int(index) for index in rest[1:]]
    if task == "judge":
        from _compare import judge

        found = {i: judge(rows.all[i], {side: folder / side / str(i) for side in (TORCH, OURS)}) for i in indices}
        print(json.dumps({index: asdict(verdict) for index, verdict in found.items()}))
        return
    for index in indices:
        run_row(rows.all[index], task, folder / task / str(index))


def run_row(row: Row, side: str, folder: Path) -> None:
    """Run all ranks of one row, and kill ranks that hang."""
    shared = folder / "files"
    shared.mkdir(parents=True)
    port = free_port()
    ranks = {fork(row, side, rank, folder, port): rank for rank in range(row.world)}
    ends_at = time.monotonic() + row.timeout
    failed_at: float | None = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank = ranks.pop(pid)
            if status and not (folder / f"error{rank}.txt").exists():
                (folder / f"error{rank}.txt").write_text(f"the process ended with status {status}")
            if status and failed_at is None:
                failed_at = time.monotonic()
        now = time.monotonic()
        # Ranks that wait for a failed rank get 5 seconds to report their own error.
        if ranks and (now > ends_at or (failed_at is not None and now > failed_at + 5)):
            for pid, rank in ranks.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if failed_at is None:
                    (folder / f"error{rank}.txt").write_text(f"hangs: not finished after {row.timeout:g} seconds")
            return
        time.sleep(0.01)


def fork(row: Row, side: str, rank: int, folder: Path, port: int) -> int:
    """Start one rank and return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with (folder / f"output{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        status = run_rank(row, side, rank, folder, port)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_rank(row: Row, side: str, rank: int, folder: Path, port: int) -> int:
    """Run the program of a row as one rank and return the exit status."""
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(row.world),
        "LOCAL_WORLD_SIZE": str(row.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder / "files")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(side, rank, row.world, folder / "files")
    try:
        row.program(run)
        if row.sharded and not any(name.startswith("sharded") for name in run.noted):
            raise AssertionError("the row did not check that a model is sharded; call Run.sharded")
        torch.save(run.noted, folder / f"noted{rank}.pt")
    except BaseException as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        (folder / f"error{rank}.txt").write_text(f"{type(error).__name__}: {first}\n\n{traceback.format_exc()}")
        return 1
    return 0


def free_port() -> int:
    """Return a free port. Another process can still bind it before the ranks do."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
