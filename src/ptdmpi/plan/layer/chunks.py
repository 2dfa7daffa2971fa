"""The number of logits of a microbatch that the loss widens to float32 at once; no bit depends on
it.

On a CPU this is 1 MiB, which fits into a core's caches. On a device it is 64 MiB, so that kernels
are few and long. The value for devices is reasoned, not measured.
"""

HOST_ELEMENTS = 2**18
DEVICE_ELEMENTS = 2**24


def loss_rows(columns: int, on_host: bool) -> int:
    """Return how many rows of `columns` logits are widened at once, at least 1."""
    elements = HOST_ELEMENTS if on_host else DEVICE_ELEMENTS
    return max(1, elements // max(1, columns))
