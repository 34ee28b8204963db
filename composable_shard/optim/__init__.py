"""Optimizers for sharded parameters: steps of full matrices on owner ranks, and steps inside of backward.

from composable_shard import optim

matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
muon = optim.owned(torch.optim.Muon, matrices, lr=0.02)
"""

from .._memory.offload import offload_optimizer as offload_optimizer
from ._in_backward import InBackward as InBackward
from ._in_backward import in_backward as in_backward
from ._matrices import Blocks as Blocks
from ._owned import Owned as Owned
from ._owned import owned as owned

__all__ = ["Blocks", "InBackward", "Owned", "in_backward", "offload_optimizer", "owned"]
