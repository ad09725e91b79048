"""One microbatch's trees in, the packed layout that layers execute on out."""
