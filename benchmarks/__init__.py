"""Measurements, one command each. They check what they measure first and print no figure if a check fails."""
