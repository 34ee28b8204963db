"""The memory pool for gathers and reductions, and the offload of optimizer state to the host and to disk."""
