"""Describe what the loss counts: its labels, its classes, and whether microbatches may be averaged."""
