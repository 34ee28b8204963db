"""Send weights from a sharded model to ranks of another layout, such as an inference engine.

    plan = weights.plan_together(group, sends=model)  # on each rank that trains
    weights.send(model, plan, group)  # after some steps

    plan = weights.plan_together(group, receives=engine)  # on each rank of the engine: a model, or its layout
    weights.receive(plan, engine, group)

Each rank receives the slices that it holds, and nothing else. No rank gathers a full tensor.
"""

from .._plan.boxes import Box
from ._builders import tensor_parallel
from ._channel import connect
from ._describe import layout
from ._hub_names import hub_names
from ._layout import LocalTensor, Piece, TensorInfo, WeightLayout
from ._plan import Plan, Transfer, plan_transfer
from ._slices import fill, local_slices
from ._targets import Versions
from ._updates import Update, plan_together, receive, send

__all__ = [
    "Box",
    "LocalTensor",
    "Piece",
    "Plan",
    "TensorInfo",
    "Transfer",
    "Update",
    "Versions",
    "WeightLayout",
    "connect",
    "fill",
    "hub_names",
    "layout",
    "local_slices",
    "plan_together",
    "plan_transfer",
    "receive",
    "send",
    "tensor_parallel",
]
