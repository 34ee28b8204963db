"""Run `python -m composable_shard run ...` in forks of one process that has imported torch. Started by test_run.py.

Each line of the input is a JSON list: file for the output, file for the errors, working directory, arguments. The
answer to each line is a line with the exit code.
"""

import gc
import json
import os
import sys

from composable_shard.cli.main import main


def serve() -> list[str] | None:
    """Fork for each input line. In a fork, return the arguments of the program."""
    for line in sys.stdin:
        output, errors, folder, arguments = json.loads(line)
        child = os.fork()
        if not child:
            for path, descriptor in ((output, 1), (errors, 2), (os.devnull, 0)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
            os.chdir(folder)
            return arguments
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


gc.collect()
gc.freeze()  # otherwise each fork copies the pages of all torch objects when it ends
given = serve()
if given is not None:
    sys.argv[:] = ["__main__.py", *given]  # the value under `python -m composable_shard`
    sys.exit(main())
