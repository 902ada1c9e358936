"""The Triton forms of the kernels, which NVIDIA devices run; one file for each file of kernels that has one."""
