"""Explain a compiled program to a person: the overview, the bottlenecks, and the page for the browser."""
