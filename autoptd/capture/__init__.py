"""Trace the user's model into a Program of one stage, with its source lines, or refuse what a trace would lose."""
