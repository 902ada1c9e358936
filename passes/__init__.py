"""Compile time: each pass is a pure function from one Program to the next."""

if not __name__.startswith("autoptd."):
    raise ImportError("this folder is imported as autoptd.passes")
