"""Prove a compiled program before it runs: its boundaries, schedule, tied weights and tensor-parallel arithmetic."""
