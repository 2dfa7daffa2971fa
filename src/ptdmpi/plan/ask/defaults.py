"""The default batch size and the default precision of the predictions of `ptdmpi plan` and `ptdmpi
ask`."""

from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config.presets import recipe
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_cluster, load_model, preset_and_keys

PREFERRED = ("bf16", "fp16")
# Number of tokens in a step, if no batch is published for a preset. Touvron et al. 2023 (arXiv
# 2302.13971, section 2.2) use about 4 million tokens for all their models.
USUAL_TOKENS = 2**22


def default_batch(model: str) -> int:
    """Return the global batch of `model`, in sequences per step. By default, this is the batch that
    was published for the model's preset, for example in a paper.

    If `model` changes the sequence length of the preset, the returned batch has as many tokens as
    the published batch. If no batch is published, the returned batch has about `USUAL_TOKENS`
    tokens. Whenever the published batch is not used as it is, a note on stderr says so. Raises
    InputError if `model` is not based on a preset.
    """
    preset, keys = preset_and_keys(model)
    if preset is None:
        raise InputError(
            f"give --batch (sequences per step): no batch is published for model {model}"
        )
    published = recipe(preset)["batch"].get("global_size")
    if published is not None and "seq_length" not in keys:
        return published
    seq_length = load_model(model).config.seq_length
    tokens = USUAL_TOKENS
    if published is not None:
        tokens = published * load_model(preset).config.seq_length
    batch = max(1, tokens // seq_length)
    note(
        f"ptdmpi: no batch of {model} is published; {counted(batch, 'sequence')}, "
        f"{batch * seq_length:,} tokens, are assumed: --batch gives another number"
    )
    return batch


def usual_precision(cluster: Cluster) -> str:
    """Return bf16 if the cluster file has the peak FLOP/s of bf16. Otherwise return fp16 if the
    file has the peak of fp16, and otherwise the first precision in the file."""
    known = cluster.device.peak_flops
    for precision in PREFERRED:
        if precision in known:
            return precision
    return next(iter(known))


def pricer_of_names(model: str, cluster: str, batch: int | None) -> Pricer:
    """Return a pricer of the model named `model` on the cluster named `cluster`, in the cluster's
    usual precision.

    If `batch` is None, the batch is the result of `default_batch`. Raises InputError for unknown
    names, and if `batch` is None and the model is not based on a preset.
    """
    machine = load_cluster(cluster)
    size = batch or default_batch(model)
    return Pricer.of(machine, load_model(model), size, usual_precision(machine))
