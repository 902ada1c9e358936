"""Measure a machine's kernels, memory and messages, and write them as a cluster file for the simulator."""
