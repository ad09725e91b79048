"""Kernels of single layers on a GPU. Each is checked against a float32 reference before it is timed."""
