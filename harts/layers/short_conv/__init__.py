"""Short causal convolution along tree paths."""
