"""The names of torch's private FSDP2 state that our modules have, for `tools/list_fsdp2_names.py`."""

from __future__ import annotations

from typing import NamedTuple

_TRACKER = "`FSDPMemTracker`"
_PIPELINES = "`torch.distributed.pipelining`"


class Row(NamedTuple):
    """Some names of one class.

    Attributes:
        names: names that are used for the same purpose.
        users: public code that uses them; empty if none is known.
        here: what they do here. Reading them gives the value that torch has at the same point of a step.
    """

    names: tuple[str, ...]
    users: str
    here: str


MODULE = (
    Row(("_get_fsdp_state",), "torch, TransformerEngine, MindSpeed, VeOmni", "returns the state"),
    Row(("fully_shard.state(module)",), "torch", "the same, also for torch's own `fully_shard.state`"),
    Row(
        ("torch.distributed._composable_state._get_module_state", "_get_module_fsdp_state", "_module_state_mapping"),
        "torch, TransformerEngine, NeMo Automodel",
        "find the state, which is an instance of torch's `FSDPState`",
    ),
)

STATE = (
    Row(("_modules", "_device", "_mp_policy"), "TransformerEngine, finetuning-scheduler", "read only"),
    Row(("_fsdp_param_group", "_fsdp_param_groups"), "many", "the groups"),
    Row(("_is_root", "_lazy_init"), "torch, verl", "`_lazy_init` builds the runtime with this module as its root"),
    Row(
        ("_training_state",),
        "TransformerEngine, VeOmni",
        "the current phase; setting IDLE has no effect, because an error needs no clean-up",
    ),
    Row(
        ("_auto_reshard_after_forward",),
        "trainers for reinforcement learning",
        "can be set: True is the default of `fully_shard`, False reshards the root, too",
    ),
    Row(
        ("_pre_forward_hook_handle", "_post_forward_hook_handle", "_pre_forward", "_post_forward"),
        _TRACKER,
        "a tool can replace our hooks by its own, which call these methods; direct calls raise an error",
    ),
    Row(("_states_to_forward_prefetch", "_states_to_backward_prefetch"), "", "read only"),
    Row(("_comm_ctx",), "`share_comm_ctx`", "the communication streams; setting another root's context shares them"),
    Row(("_state_ctx",), _PIPELINES, "the state of the root (below)"),
    Row(("_reset_iter_state",), "torch", "as the module's `reset_iter_state`"),
    Row(
        ("_root_post_backward_final_callback",),
        _PIPELINES,
        "reduces accumulated gradients in the order of the plan, and waits for them",
    ),
)

CONTEXT = (
    Row(("all_states",), _PIPELINES, "the states below the root, in the order of the modules"),
    Row(
        ("iter_forward_root", "post_backward_final_callback_queued", "is_last_backward", "post_optim_event"),
        "torch",
        "read only",
    ),
)

GROUP = (
    Row(("fsdp_params", "modules", "device", "mp_policy", "offload_policy", "mesh_info"), "many", "read only"),
    Row(("comm_ctx",), "`share_comm_ctx`", "as `_comm_ctx` of the state"),
    Row(("_module_fqn", "_param_group_index", "_num_param_groups"), "torch", "read only"),
    Row(
        ("post_forward_mesh_info",),
        "DINOv3, verl, servers for reinforcement learning",
        "can be set: None keeps parameters unsharded after a training forward, the mesh reshards them",
    ),
    Row(
        ("_reshard_after_forward", "_use_post_forward_mesh", "_is_hsdp", "reshard_after_backward"),
        "TransformerEngine, MindSpeed",
        "read only",
    ),
    Row(
        (
            *("reduce_grads", "all_reduce_grads", "unshard_in_backward", "gradient_divide_factor"),
            *("reduce_scatter_unused_params", "reduce_scatter_max_input_buffers", "force_sum_reduction_for_comms"),
            *("_all_reduce_hook", "_all_reduce_hook_stream", "_all_gather_comm", "_reduce_scatter_comm"),
            *("unshard_async_op", "_orig_dtype", "_reduce_dtype"),
        ),
        "",
        "read only; the error about a write names the setter",
    ),
    Row(
        ("_training_state",),
        "TransformerEngine, verl",
        "the phase; in `fsdp_pre_all_gather` it is FORWARD or PRE_BACKWARD, also for a prefetch; setting IDLE has no "
        "effect",
    ),
    Row(
        ("is_sharded", "is_sharded_post_forward", "is_unsharded", "_sharded_state", "_all_gather_result"),
        "torch, chunked losses",
        "read only",
    ),
    Row(
        ("_all_gather_process_group", "_reduce_scatter_process_group", "_all_reduce_process_group"),
        "torch",
        "the process groups that you passed; on gloo, the library communicates on its own",
    ),
    Row(("lazy_init", "unshard", "wait_for_unshard", "reshard"), "chunked losses", "as the module's methods"),
    Row(
        ("pre_backward",),
        _TRACKER,
        "a tool can replace it; the replacement must call the original",
    ),
    Row(
        ("post_backward",),
        f"{_TRACKER}, {_PIPELINES}, multi-token heads",
        "can be replaced in the same way; a call between backwards reduces what the group has accumulated",
    ),
    Row(("finalize_backward",), "multi-token heads", "does nothing, because `post_backward` waits"),
)

PARAM = (
    Row(("_param_fqn", "_module_info"), "many", "read only"),
    Row(("sharded_param", "_sharded_local_tensor", "_sharding_spec"), "many", "the DTensor, its shard and its layout"),
    Row(
        ("_sharded_param_data", "padded_sharded_param_size"),
        "AlloyLM",
        "the shard as a 1D view; if other ranks have more rows than this one, a padded copy that cannot be written",
    ),
    Row(
        ("sharded_size", "contiguous_sharded_stride", "_orig_size", "_contiguous_orig_stride", "fsdp_placement"),
        "finetuning-scheduler",
        "read only",
    ),
    Row(("_spmd_mesh", "_spmd_placements", "shard_mesh", "mesh_info", "post_forward_mesh_info"), "torch", "read only"),
    Row(("is_dtensor", "orig_dtype", "param_dtype", "reduce_dtype", "mp_policy", "device"), "torch", "read only"),
    Row(("sharded_grad_dtype", "unsharded_grad_dtype"), "torch 2.15", "read only"),
    Row(("offload_to_cpu", "pin_memory"), "AlloyLM", "read only"),
    Row(("sharded_state",), "torch", "read only"),
    Row(
        ("unsharded_param", "_unsharded_param"),
        f"{_TRACKER}",
        "the unsharded parameter; an error while it is sharded",
    ),
    Row(("unsharded_accumulated_grad",), _PIPELINES, "the gradient that was accumulated without gradient sync"),
    Row(
        ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"),
        _PIPELINES,
        "do nothing: gradients without gradient sync are always accumulated",
    ),
)

TABLE = {
    "Module": MODULE,
    "State (`FSDPState`)": STATE,
    "State of the root (`FSDPStateContext`)": CONTEXT,
    "Group (`FSDPParamGroup`)": GROUP,
    "Parameter (`FSDPParam`)": PARAM,
}
