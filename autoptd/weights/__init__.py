"""Find the first weights: a module, a state dict, a safetensors folder, or the model's own initialization."""
