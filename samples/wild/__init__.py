"""Small models in the styles of public code bases: each stands for a kind of thing that people write."""
