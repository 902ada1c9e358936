"""Ordinary training scripts, before and after: each pair differs by at most ten lines."""
