"""Find the axes of every tensor, choose those to divide, and rewrite the graph for one rank (SC21 §2.3)."""
