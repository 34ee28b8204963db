"""Enable FSDP2 of Accelerate, and of Transformers' Trainer, on a CPU.

Without an accelerator, Accelerate ignores its FSDP plugin and uses DDP. This module sets the distributed type that
Accelerate uses on accelerators. All other code of Accelerate runs unchanged.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType


def fsdp2_on_cpu() -> None:
    """Set the device, process group and distributed type, so that Accelerate uses FSDP2 as it does on GPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
