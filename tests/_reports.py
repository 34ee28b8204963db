"""Report the outcome of a rank to the test that started it."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager


@contextmanager
def reported(rank):
    """At the end of the context, print one line of JSON with the rank, the error and its text, and the seconds."""
    begin = time.monotonic()
    report = {"rank": rank, "error": None}
    try:
        yield
    except BaseException as error:
        report |= {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        print(json.dumps(report | {"after": time.monotonic() - begin}), flush=True)
