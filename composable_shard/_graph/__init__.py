"""What stands for the engine while torch.compile traces: operators in the graph, in the plan's order."""
