"""A switch in user space, which connects network cards by a link of known rate and delay.

A frame leaves its node at the rate of the network card, waits for the receiver's card (two senders
share the receiver's rate), and arrives after the delay. The queues have no limit except TCP's
windows, so no frame is lost, as on InfiniBand.

The traffic control of Linux (the tool tc) cannot replace this switch. Its discipline netem can
delay frames in the kernel, but many kernels are built without netem. Its discipline tbf limits the
rate, but has no delay. A frame may be a TCP segment of up to 64 kB, which is not divided into
packets (PACKET_VNET_HDR of packet(7), struct virtio_net_hdr). A link of 1 Gbit/s carries only 2000
such segments per second.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

# Constants of linux/if_packet.h and asm-generic/socket.h that Python's module socket does not have.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
HEADER = 10  # Size of struct virtio_net_hdr, which precedes the frame.
LARGEST = 70_000  # Maximum size of a frame with segmentation offload and its headers.
BUFFER = 32 << 20
BATCH = 16  # maximum number of frames that are taken from one port before the next port's turn


def card(name: str) -> socket.socket:
    """Return a socket for all frames that the network card `name` of this namespace sends and
    receives. A struct virtio_net_hdr precedes each frame."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
    frames.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    frames.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        frames.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    frames.bind((name, ETH_P_ALL))
    return frames


class Port:
    """The switch's end of the cable to one node. `cable` is a raw socket from `card`."""

    def __init__(self, cable: socket.socket) -> None:
        self.cable = cable
        self.sent_s = 0.0  # The time at which the node's card has sent all its frames.
        # The time at which the node's card will have received all queued frames.
        self.received_s = 0.0
        # the queued frames: (arrival time, header and frame)
        self.queue: deque[tuple[float, bytes]] = deque()


class Switch:
    """A switch between ports. Each port has a queue of frames that wait for their delivery to the
    port's node. `rate` is in bytes per second, and `delay_s` is the delay in one direction."""

    def __init__(self, ports: Sequence[Port], rate: float, delay_s: float) -> None:
        self.ports = ports
        self.rate = rate
        self.delay_s = delay_s
        # hardware address -> the port on which its frames arrive
        self.behind: dict[bytes, Port] = {}

    def take(self, port: Port) -> None:
        """Read frames that the node at `port` has sent, and put them into the queues of their
        receivers."""
        for _ in range(BATCH):
            try:
                data = port.cable.recv(LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            receiver = data[HEADER : HEADER + 6]
            source = data[HEADER + 6 : HEADER + 12]
            self.behind[source] = port
            duration = (len(data) - HEADER) / self.rate
            begin = max(now, port.sent_s)
            port.sent_s = begin + duration
            for other in self._receivers(receiver, port):
                other.received_s = max(begin, other.received_s) + duration
                other.queue.append((other.received_s + self.delay_s, data))

    def _receivers(self, address: bytes, sender: Port) -> list[Port]:
        """Return the port of a hardware address. For a broadcast address (whose first byte is odd)
        or an unknown address, return all ports except the sender's port."""
        broadcast = address[0] & 1
        if not broadcast and address in self.behind:
            return [self.behind[address]]
        return [port for port in self.ports if port is not sender]

    def deliver(self) -> float | None:
        """Send the frames whose delay is over to their nodes. Return the seconds until the next
        frame must be delivered; None if no frame is queued."""
        arrivals = []
        for port in self.ports:
            while port.queue and port.queue[0][0] <= time.monotonic():
                port.cable.send(port.queue.popleft()[1])
            if port.queue:
                arrivals.append(port.queue[0][0])
        if not arrivals:
            return None
        return max(0.0, min(arrivals) - time.monotonic())

    def run(self) -> None:
        """Forward frames between the ports until standard input ends."""
        # The ranks keep the cores busy. With ordinary priority, this process would have to wait for
        # a core, and frames would be late.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        by_cable = {port.cable: port for port in self.ports}
        while True:
            # select has a resolution of microseconds; poll has a resolution of milliseconds only
            ready, _, _ = select.select([*by_cable, sys.stdin], [], [], self.deliver())
            if sys.stdin in ready:
                return
            for cable in ready:
                self.take(by_cable[cable])
