"""Cost of models: FLOPs, time, chips."""
