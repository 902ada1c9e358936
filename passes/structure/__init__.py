"""Find what repeats in a graph: its linear order and its layers."""
