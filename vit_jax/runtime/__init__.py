"""Devices, processes, signals, memory and the standard streams."""
