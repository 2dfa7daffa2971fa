"""The batch and the precision of a prediction whose request names none."""

from ptdmpi.base.errors import InputError
from ptdmpi.config.presets import recipe
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_cluster, load_model, preset_and_keys

PREFERRED = ("bf16", "fp16")


def published_batch(model: str) -> int:
    """Return the global batch, in sequences, that the source of the preset `model` states.

    A preset with a changed sequence length has no published batch, because the same number of
    longer or shorter sequences is a different number of tokens. Raises InputError if no batch is
    published.
    """
    preset, keys = preset_and_keys(model)
    batch = None
    if preset is not None and "seq_length" not in keys:
        batch = recipe(preset)["batch"].get("global_size")
    if batch is None:
        raise InputError(f"give --batch, sequences per step: none is published of model {model}")
    return batch


def usual_precision(cluster: Cluster) -> str:
    """Return the first precision that the cluster file has a peak for: bf16, else fp16, else
    any."""
    known = cluster.device.peak_flops
    for precision in PREFERRED:
        if precision in known:
            return precision
    return next(iter(known))


def pricer_of_names(model: str, cluster: str, batch: int | None) -> Pricer:
    """Return a pricer of a model on a cluster, both by name, in the cluster's usual precision.

    If `batch` is None, the published batch is used. Raises InputError for unknown names and for a
    model without a published batch.
    """
    machine = load_cluster(cluster)
    size = batch or published_batch(model)
    return Pricer.of(machine, load_model(model), size, usual_precision(machine))
