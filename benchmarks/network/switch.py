"""A switch in user space: joins network cards by a link of known rate and delay.

A frame leaves its node at the card's rate, waits for the receiver's card (two senders share its
rate), and arrives a delay later. Queues have no limit but TCP's windows, so that nothing is lost,
as on InfiniBand.

tc's netem would delay in the kernel, which many kernels are built without; tbf alone has no delay.
Segments of up to 64 kB are passed on whole, as between card and kernel (PACKET_VNET_HDR of
packet(7), struct virtio_net_hdr): 1 Gbit/s is 2000 of them a second.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

# Numbers of linux/if_packet.h and asm-generic/socket.h that Python's socket does not name.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
HEADER = 10  # of struct virtio_net_hdr, before the frame
LARGEST = 70_000  # a frame of segmentation offload and its headers
BUFFER = 32 << 20
BATCH = 16  # frames taken from one port before others have their turn


def card(name: str) -> socket.socket:
    """All that the network card `name` of this namespace sends and receives, each frame behind a
    struct virtio_net_hdr."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        found.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    found.bind((name, ETH_P_ALL))
    return found


class Port:
    """The switch's end of one node's cable: a socket of datagrams, as `card` makes it."""

    def __init__(self, cable: socket.socket) -> None:
        self.cable = cable
        self.sent_s = 0.0  # when the node's card has sent all that came from it
        self.received_s = 0.0  # when it will have received all that goes to it
        self.queue: deque[tuple[float, bytes]] = deque()  # (when it arrives, header and frame)


class Switch:
    """Frames from port to port; `rate` in bytes per second, `delay_s` one way."""

    def __init__(self, ports: Sequence[Port], rate: float, delay_s: float) -> None:
        self.ports, self.rate, self.delay_s = ports, rate, delay_s
        self.behind: dict[bytes, Port] = {}  # hardware address -> port

    def take(self, port: Port) -> None:
        """Frames that a node has sent go into the queues of those whom they are for."""
        for _ in range(BATCH):
            try:
                data = port.cable.recv(LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            to, source = data[HEADER : HEADER + 6], data[HEADER + 6 : HEADER + 12]
            self.behind[source] = port
            others = [other for other in self.ports if other is not port]
            known = None if to[0] & 1 else self.behind.get(to)  # an odd first byte: for everybody
            duration = (len(data) - HEADER) / self.rate
            begin = max(now, port.sent_s)
            port.sent_s = begin + duration
            for other in others if known is None else [known]:
                other.received_s = max(begin, other.received_s) + duration
                other.queue.append((other.received_s + self.delay_s, data))

    def deliver(self) -> float | None:
        """Hand over what has arrived; seconds until the next frame does, None without one."""
        next_s = None
        for port in self.ports:
            while port.queue and port.queue[0][0] <= time.monotonic():
                port.cable.send(port.queue.popleft()[1])
            if port.queue:
                arrives = port.queue[0][0]
                next_s = arrives if next_s is None else min(next_s, arrives)
        return None if next_s is None else max(0.0, next_s - time.monotonic())

    def run(self) -> None:
        """Until standard input ends."""
        # Ranks keep the cores busy: an ordinary process would wait for its turn, a frame with it.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        by_cable = {port.cable: port for port in self.ports}
        while True:
            # poll counts in milliseconds, select in microseconds
            ready, _, _ = select.select([*by_cable, sys.stdin], [], [], self.deliver())
            if sys.stdin in ready:
                return
            for found in ready:
                self.take(by_cable[found])
