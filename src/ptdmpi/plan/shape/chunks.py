"""How much of a microbatch's logits the loss widens at once: that is memory of a step, and no bit.

In float32 1 MiB, which the caches of a CPU's core hold; on a device 64 MiB, so that its kernels are
few and long. Reasoned for devices: not measured for want of one.
"""

HOST_ELEMENTS, DEVICE_ELEMENTS = 2**18, 2**24


def loss_rows(columns: int, on_host: bool) -> int:
    """Rows of so many logits that are widened at once."""
    return max(1, (HOST_ELEMENTS if on_host else DEVICE_ELEMENTS) // max(1, columns))
