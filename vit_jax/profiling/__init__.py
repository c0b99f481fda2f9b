"""The cost of models: FLOPs, time, chips."""
