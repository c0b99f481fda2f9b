"""What models cost: FLOPs, time, chips."""
