"""Which transport the tests of this process use."""

from __future__ import annotations

import os
from contextlib import contextmanager

from composable_shard._comm.transports import VARIABLE


@contextmanager
def forced(name):
    """Within, `COMPOSABLE_SHARD_TRANSPORT` has this name."""
    kept = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if kept is not None:
            os.environ[VARIABLE] = kept
