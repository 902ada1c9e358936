"""Run all ranks of a program on one machine in float64 and compare loss and gradients with the plain model."""
