"""Custom GPU kernels. A backend enables a kernel after a successful trial run; all models also work without kernels."""
