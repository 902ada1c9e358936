"""Define the Program that passes rewrite: its stages, the facts about their nodes, and how to read a node."""
