"""Replaces the engine while torch.compile traces: puts gathers and reductions as operators into the graph."""
