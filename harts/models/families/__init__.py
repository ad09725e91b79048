"""One small file a model family: which of its classes see more than one token, and how they run on a tree."""
