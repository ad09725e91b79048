"""Triton kernels of linear attention on trees; imported only where Triton and fla are installed."""
