"""Provide the nn.Module of one rank, which users call, save, load and train."""
