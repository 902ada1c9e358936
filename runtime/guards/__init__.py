"""Refuse what would be wrong in silence: ranks that disagree, written parameters, non-finite values."""
