"""Tracing one module at a time into a torch.fx graph, and running such graphs in its place."""
