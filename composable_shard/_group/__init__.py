"""Parameter groups, whose parameters share a collective: their layout, gathers, reductions and saved tensors."""
