"""Join chains of memory-bound operators into one kernel each (SC21 §4.2)."""
