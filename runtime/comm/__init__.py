"""Connect ranks: process groups, point-to-point channels, and the record of when they communicated."""
