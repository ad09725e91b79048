"""Softmax attention in which every token sees its own path only."""
