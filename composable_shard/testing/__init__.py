"""Helpers for tests and trials of sharded models."""

from ._clocks import Collective as Collective
from ._fabric import Busy as Busy
from ._fabric import Fabric as Fabric
from ._fabric import fabric as fabric
