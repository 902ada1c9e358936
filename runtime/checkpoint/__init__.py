"""Save and load training state: safetensors and JSON, hashed, committed last, for any mesh."""
