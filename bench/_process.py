"""Resident memory of this process on Linux."""

import ctypes
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(key: str = "VmRSS") -> int:
    """Return the resident memory in bytes, or with "VmHWM" its peak since `forget_peak`."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def forget_peak() -> bool:
    """Return free memory to the system and reset VmHWM. Return False if the system does not support it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")
    except (OSError, AttributeError):
        return False
    return True
