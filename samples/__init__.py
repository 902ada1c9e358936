"""Scripts a user would copy: a plain GPT, its training script, the demo (``python -m samples.<name>``)."""
