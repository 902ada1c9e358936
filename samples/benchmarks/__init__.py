"""Scripts that measure: each prints one table, and ``--write`` keeps it in ``samples/benchmarks/results``."""
