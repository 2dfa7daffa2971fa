"""The operators that move the most bytes in one layer of ptdmpi, counted on the null GPU."""

from collections.abc import Iterator, Mapping

from benchmarks.dry.counting import Counting, DeviceWork
from benchmarks.dry.device import NullGpu
from benchmarks.dry.layers import LEAST, config_of
from benchmarks.dry.steps import DEVICE, offered_attention, step_of_ours
from benchmarks.gpu.parts import MODELS, Shape
from benchmarks.gpu.timing import Numbers, Row

SHOWN = 8  # number of operators that have rows of their own
OUTSIDE = "outside of operators"
Works = Mapping[str, DeviceWork]


def of_step(name: str, shape: Shape, layers: int, microbatches: int) -> dict[str, DeviceWork]:
    """Run a training step of ptdmpi twice on the null GPU. Return the work of the second run, by
    operator. The entry `OUTSIDE` has the launches that no operator of PyTorch's dispatcher made;
    their bytes are not counted."""
    step = step_of_ours(config_of(name, shape, layers, microbatches), shape.vocab_size)
    gpu = NullGpu()
    with offered_attention():
        step()
        before = gpu.launched()
        with Counting(DEVICE.type, gpu.launched) as counting:
            step()
    launches = gpu.launched() - before - counting.work().launches
    return {**counting.by_operator, OUTSIDE: DeviceWork(launches=launches)}


def minus(works: Works, less: Works) -> dict[str, DeviceWork]:
    """Return the work of each operator in `works` minus its work in `less`."""
    nothing = DeviceWork()
    return {
        name: DeviceWork(
            *(mine - other for mine, other in zip(work, less.get(name, nothing), strict=True))
        )
        for name, work in works.items()
    }


def shown(works: Works) -> dict[str, Numbers]:
    """Return the rows of a layer's operators: those that move the most bytes, all others together,
    and the launches outside of operators."""
    inside = {name: work for name, work in works.items() if name != OUTSIDE and work.launches}
    ordered = sorted(inside, key=lambda name: -inside[name].moved_bytes)
    rest = DeviceWork()
    for name in ordered[SHOWN:]:
        rest = rest.plus(inside[name])
    rows = {name: inside[name] for name in ordered[:SHOWN]} | {"other operators": rest}
    numbers: dict[str, Numbers] = {
        name: {"launches": work.launches, "GB moved": work.moved_bytes / 1e9}
        for name, work in rows.items()
    }
    return numbers | {OUTSIDE: {"launches": works[OUTSIDE].launches}}


def rows() -> Iterator[Row]:
    """Yield, for each model, the rows of one layer's operators in the forward and backward of one
    microbatch: a name, and a function that returns the counts."""
    for name, shape in MODELS.items():
        of_two, of_one = (
            minus(of_step(name, shape, LEAST + 1, count), of_step(name, shape, LEAST, count))
            for count in (2, 1)
        )
        for operator, numbers in shown(minus(of_two, of_one)).items():
            yield f"{name}: {operator}", lambda numbers=numbers: numbers
