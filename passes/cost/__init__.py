"""State what operators cost: FLOPs, bytes, launches and saved tensors, and their times on a described cluster."""
