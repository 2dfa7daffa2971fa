"""The time that the optimizer takes in a step. The optimizer may run on the device, on the host, or
with its state in a file."""

from ptdmpi.config import InputError
from ptdmpi.config.layout import Layout
from ptdmpi.config.precision import FLOAT32
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape.dealt import Dealt
from ptdmpi.plan.shape.matrices import Whole, gathered_bytes, iteration_bytes, products


def one_pass_bytes(moments: int, weight: int) -> int:
    """Return the bytes per parameter that the Triton kernel of the update moves. The kernel reads
    and writes the gradient, the master weight and the `moments` moments. `weight` is the number of
    bytes of a weight. If these are fewer than the bytes of a float32 number, the kernel also writes
    the weight, which is then separate from the master weight."""
    return 2 * (2 + moments) * FLOAT32.bytes + weight * (weight < FLOAT32.bytes)


class UpdateTimes:
    """The times, in seconds, of the optimizer's update. The argument `elements` of the methods is
    always the number of parameters of one rank. If the state is sharded, the rank updates only its
    shard of these parameters."""

    def __init__(self, machine: Machine, method: RunMethod) -> None:
        """Store the machine. `method` has the number of moments that the optimizer keeps per
        parameter, and says whether a kernel in Triton can do the complete update."""
        self.moments = method.moments
        self.machine, self.cluster = machine, machine.cluster
        software = self.cluster.software
        self.gradient_bytes = software.gradient_bytes
        self.one_pass = method.one_pass and "update" in software.triton

    def optimizer_s(self, layout: Layout, elements: float) -> float:
        """Return the seconds of the optimizer's kernels on a rank with `elements` trained
        parameters. The memory bandwidth limits the speed of these kernels.

        The kernels clear the gradients, divide them by the number of data ranks, and update this
        rank's shard. (This trainer needs no kernel for the division, because it divides the loss
        instead.) If one kernel in Triton does the update, it also clears the gradients of the
        shard. Raises InputError if the cluster file lacks a rate that an offloaded update needs.
        """
        shard = elements / layout.shards
        one_pass = self.one_pass and layout.offload == "none"
        kernels = self._update_bytes(one_pass)
        if layout.offload == "none":
            update_s = self.machine.update_s(shard, kernels)
        else:
            update_s = self._offloaded_s(layout.offload, shard, kernels)
        summed_only = layout.data == 1 or self.cluster.software.adds_in_place
        divided = 0 if summed_only else 2 * self.gradient_bytes
        held = elements / layout.sharing.gradient_shards
        streamed = (held - shard * one_pass) * self.gradient_bytes + held * divided
        return update_s + (self.machine.stream_s(streamed) if streamed else 0.0)

    def own_norm_s(self, elements: float, every: int) -> float:
        """Return the seconds per step, on average, that the norm of a rank's own gradient takes if
        it is computed every `every` steps. The result is 0 if `every` is 0.

        Computing the norm reads the gradients once more. The messages that exchange norms are left
        out, because they are short.
        """
        return self.machine.stream_s(elements * self.gradient_bytes) / every if every else 0.0

    def matrix_s(self, whole: Whole, tensor: int, group: Group) -> float:
        """Return the seconds that Muon needs to update one parameter. The result includes the
        matrix products, which every tensor-parallel rank computes for whole matrices, and the
        gather of the parameter's slices over the tensor axis."""
        products_s = sum(self.machine.gemm_s(*sizes) for sizes in products(whole))
        gathered = gathered_bytes(whole, tensor, self.machine.element_bytes)
        return products_s + self.machine.all_gather_s(gathered, group)

    def matrices_s(self, some: Dealt, tensor: int, group: Group, shards: Group) -> float:
        """Return the seconds that Muon needs to update all matrices that a rank orthogonalizes,
        which `some` describes. The result includes the exchange of slices of the matrices with the
        other ranks of the shard group (ranks that divide one copy of the state), before and after
        the update. `group` has the ranks of the tensor axis, and `shards` those of the shard
        group."""
        made = (n * self.matrix_s(matrix, tensor, group) for (matrix, _), n in some.makes.items())
        element, crosses = iteration_bytes(self.machine.element_bytes), shards.nodes > 1
        ways = [
            sum(self.machine.send_s(n * element, crosses_nodes=crosses) for n in way.values())
            for way in (some.gives, some.takes)
        ]
        return sum(made) + 2 * max(ways)

    def _update_bytes(self, one_pass: bool) -> list[int]:
        """Return the bytes per parameter that each kernel of the update moves.

        There are up to six kernels. In order, they convert the gradient to float32 (if it is in
        fp16 or bf16), divide the gradient by the loss scale (in fp16), compute the norm, scale the
        gradient to clip it, run the optimizer, and copy the master weight to the weight (if the
        weight is in fp16 or bf16). The optimizer's kernel reads gradient, master weight and
        moments, and writes master weight and moments. In all, this kernel moves 7 float32 numbers
        per parameter for AdamW and 3 for SGD. If `one_pass` is True, one kernel in Triton scales
        the gradient, runs the optimizer, writes the weight and clears the gradient.
        """
        gradient, weight, w = self.gradient_bytes, self.machine.element_bytes, FLOAT32.bytes
        kernels = [w, 2 * w, (3 + 2 * self.moments) * w]
        if one_pass:
            kernels = [w, one_pass_bytes(self.moments, weight)]
        if gradient < w:
            kernels.append(gradient + w)
        if self.machine.dtype == "fp16":
            kernels.append(2 * w)
        if weight < w and not one_pass:
            kernels.append(w + weight)
        return kernels

    def _offloaded_s(self, offload: str, shard: float, kernels: list[int]) -> float:
        """Return the seconds of an offloaded update of `shard` parameters. The bandwidth of the
        host's memory limits the speed of the update. `kernels` has the bytes per parameter that
        each kernel moves.

        Gradients are sent from the device to the host, and weights from the host to the device (Ren
        et al. 2021, arXiv 2101.06840, section 4). If the optimizer state is in a file, the state is
        read and written. The ranks on a node share the node's memory and disk.
        """
        if missing := self.cluster.lacks(offload):
            keys = " and ".join(f"host.{key}" for key in missing)
            raise InputError(
                f'cluster {self.cluster.name}: offload = "{offload}" has no known time without '
                f'{keys} in the cluster file; legal: add what is missing, or offload = "none"'
            )
        host, devices = self.cluster.host, self.cluster.node.devices
        weight = self.machine.element_bytes
        if self.cluster.on_host:
            update_s = self.machine.update_s(shard, kernels)
        else:
            assert host.memory_bytes_per_s and host.link_bytes_per_s  # checked by `lacks`
            update_s = shard * sum(kernels) / (host.memory_bytes_per_s / devices)
            # Without separate master weights, the host has no copy of the weights, so the weights
            # are sent from the device to the host and back.
            moved = self.gradient_bytes + weight * (2 if weight >= FLOAT32.bytes else 1)
            update_s += shard * moved / host.link_bytes_per_s
        if offload == "disk":
            assert host.disk_bytes_per_s
            state = FLOAT32.bytes * (self.moments + (weight < FLOAT32.bytes))
            update_s += 2 * shard * state / (host.disk_bytes_per_s / devices)
        return update_s
