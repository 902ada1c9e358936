"""Rewrite activations from [b, s, h] to [s, b, h] where this reduces memory copies (SC21 §4.2)."""
