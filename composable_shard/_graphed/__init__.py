"""Training steps that are captured in CUDA graphs (`make_graphed_step`)."""
