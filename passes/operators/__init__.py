"""State what the compiler knows about each operator: one record per operator, one file per family."""
