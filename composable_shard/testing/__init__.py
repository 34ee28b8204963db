"""Test sharded layers on a laptop, in one process, without a launcher or network ports."""

from ._clocks import Collective as Collective
from ._fabric import Busy as Busy
from ._fabric import Fabric as Fabric
from ._fabric import fabric as fabric
from ._fake import fake as fake
from ._processes import processes as processes
from ._races.checking import Checked as Checked
from ._races.checking import races as races
from ._races.report import Race as Race
from ._spmd import World as World
from ._spmd import spmd as spmd
from ._trace import assert_collectives as assert_collectives
from ._trace import assert_peak_bytes as assert_peak_bytes
from ._trace import trace as trace
from ._unsharded import assert_matches_unsharded as assert_matches_unsharded

__all__ = [
    "Busy",
    "Checked",
    "Collective",
    "Fabric",
    "Race",
    "World",
    "assert_collectives",
    "assert_matches_unsharded",
    "assert_peak_bytes",
    "fabric",
    "fake",
    "processes",
    "races",
    "spmd",
    "trace",
]
