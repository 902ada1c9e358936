"""Refuse what would go wrong silently: ranks that disagree, overwritten parameters, non-finite values."""
