"""Hold a compiled program as plain data: mesh, placements, schedule, manifest and text."""
