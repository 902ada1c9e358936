"""Search for the fastest mesh and settings on a described cluster, and explain the time of a compiled program."""
