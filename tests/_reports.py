"""How a rank that a test has started tells the test how it ended."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager


@contextmanager
def reported(rank):
    """When the context ends, print one line of JSON: the rank, its error and the error's text, and the seconds."""
    begin = time.monotonic()
    report = {"rank": rank, "error": None}
    try:
        yield
    except BaseException as error:
        report |= {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        print(json.dumps(report | {"after": time.monotonic() - begin}), flush=True)
