"""Cut the model into balanced pipeline stages (SC21 §2.2), with OR-tools CP-SAT where ranks have several."""
