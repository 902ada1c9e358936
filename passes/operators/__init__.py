"""State what the compiler knows of each operator: one record each, by families. Imports ir."""
