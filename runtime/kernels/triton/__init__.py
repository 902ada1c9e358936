"""The Triton forms of the kernels, which NVIDIA devices run."""
