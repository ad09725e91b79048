"""Hidden states and a layout in, hidden states out: attention, linear attention and convolution along tree paths."""
