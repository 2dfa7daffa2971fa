"""The memory of one rank at its peak, divided by content."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Footprint:
    """The memory of one rank, in bytes by kind of content, at the moment at which the rank needs
    the most memory. If the device has its own memory, `host` is the number of bytes in the host's
    memory: offloaded state, buffers for tensors that are updated on the host, and copies of the
    state."""

    weights: float
    gradients: float
    optimizer: float  # moments, and master weights if the weights are in fp16 or bf16
    activations: float
    working: float  # the working memory of one backward pass
    runtime: float = 0.0  # the context of the device, and the buffers of its messages
    copies: float = 0.0  # copies of the training state, if ranks compute on the host
    host: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of a rank's memory at its peak, in bytes, by name. The part "copies" is
        left out if it is 0."""
        every = {name: count for name, count in asdict(self).items() if name != "host"}
        if not self.copies:
            del every["copies"]
        return every

    @property
    def standing(self) -> float:
        """Return the bytes on the device that are in use during the whole step."""
        return self.weights + self.gradients + self.optimizer + self.runtime + self.copies

    @property
    def total(self) -> float:
        """Return the bytes that are in use on the device when the rank needs the most memory."""
        return self.standing + self.activations + self.working
