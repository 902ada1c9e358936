"""Search for the mesh, schedule and microbatch size that train a model fastest on a described cluster."""
