"""The replacement of the engine under torch.compile: gathers and reductions become operators of the graph."""
