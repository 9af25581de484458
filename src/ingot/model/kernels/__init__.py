"""Our custom kernels. A backend enables them after seeing them run; every model also works without them."""
