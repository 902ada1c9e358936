"""Fill this rank's slices of the parameters, from given tensors or from keyed random numbers."""
