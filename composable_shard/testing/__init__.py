"""To test sharded layers on a laptop: without a launcher, without ports, in one process."""

from ._spmd import World as World
from ._spmd import spmd as spmd
