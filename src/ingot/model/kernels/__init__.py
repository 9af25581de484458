"""Custom kernels. A backend enables a kernel after a successful trial; every model also works without them."""
