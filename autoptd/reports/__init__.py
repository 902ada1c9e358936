"""Show a compiled program to a person: the overview, its text, and the page for the browser."""
