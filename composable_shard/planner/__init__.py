"""Before a run: what a strategy takes of memory and time, on machines that need not be there."""

from .machine import Link as Link
from .machine import Machine as Machine
