"""Cut the model into balanced pipeline stages (SC21 §2.2), using OR-tools CP-SAT if a rank holds several."""
