"""Devices, processes, signals, memory: what a program needs of its machine."""
