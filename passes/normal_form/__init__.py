"""Bring a captured graph into one form: no mutation, no aliases, constants folded, autocast as casts."""
