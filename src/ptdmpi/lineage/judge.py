"""The decision whether a run may continue from a checkpoint with its present data and
configuration.

Settings that may change on resume do not stop the run; their changes are logged. If the data or its
order has changed, the run continues only if the user has allowed this (`data.change = "from
here"`), and logs the change. After any other change, the run stops with a one-line error that names
the change and the legal values.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from ptdmpi.config import Config, InputError, ModelConfig
from ptdmpi.config.model import DERIVED
from ptdmpi.config.section import OnResume
from ptdmpi.lineage.trained_on import Source, Stretch, TrainedOn, changed_at
from ptdmpi.plan.layout.topology import file_sha256

# keys of [model] that may change between two starts of a run
FREE_TO_CHANGE = {
    key for key in ModelConfig.model_fields if ModelConfig.on_resume(key) is not OnResume.BOUND
}
# Keys of [model] that change the function of a model, but may leave the shapes of its tensors
# unchanged. `hidden` is first, because another hidden size also changes the default of `head_size`,
# and an error must name the key that the user has changed.
HEADS = ("hidden", "heads", "kv_heads", "head_size", "mup_base_hidden", "mup_base_head_size")
# keys of [model] that scale the angles of rotary positions
ROPE_SCALING = {
    "rope_scaling",
    "rope_factor",
    "rope_low_factor",
    "rope_high_factor",
    "rope_original_length",
    "rope_attention_factor",
}
# Keys of [model] that may differ between the model with adapters and its base model. These are the
# keys that may change between two starts, and three more. Adapters may be trained with another
# sequence length than the base model. `kind` only sets the defaults of other keys. `vocab_size`
# need not be compared, because the shapes of the tensors would reveal a difference.
FREE_BENEATH = FREE_TO_CHANGE | {"kind", "vocab_size", "seq_length"}
# keys that `Config.with_head` sets, because a task's head replaces the head of the base model
NEW_HEAD = {"output_head", "classes", "tie_embeddings", "sentence_order"}
FROM_HERE = "from here"
# A checkpoint records the values of the keys in these categories. Keys that determine the order of
# samples are in another category and are not recorded. Instead, a checkpoint contains a `TrainedOn`
# with a list of stretches; a stretch is a range of consecutive steps whose samples come from one
# order. A resume compares the stretches, which identify the data by a hash of its content.
RECORDED = (OnResume.BOUND, OnResume.REPORTED)


@dataclass(frozen=True)
class Before:
    """The facts about a checkpoint that its manifest contains. `trained_on` is None if an older
    version of this program wrote the checkpoint. In this case, only `samples` and `seed` are known
    about the checkpoint's data. `kernels` has the kinds of kernels that the checkpoint stores (see
    `ptdmpi.model.kernels.stored`)."""

    path: Path
    step: int
    samples: int
    seed: int
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    trained_on: TrainedOn | None
    kernels: Collection[str] = ()

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> "Before":
        """Return a description of the checkpoint at `path`, from its manifest. Raise InputError if
        the manifest has values that no version of this program writes."""
        progress = manifest["progress"]
        numbers = (progress["step"], progress["samples"], progress["seed"])
        try:
            trained_on = TrainedOn.from_json(manifest.get("trained_on"))
        except ValueError as error:
            raise InputError(f"checkpoint {path}: {error}") from None
        kept = manifest.get("kernels")
        kernels = tuple(kept) if isinstance(kept, Mapping) else ()  # older versions: a list
        known = manifest.get("settings", {})
        return cls(path, *numbers, manifest["model"], known, trained_on, kernels)


@dataclass(frozen=True)
class Answer:
    """The data with which a run continues. `changed` has a text for each difference between this
    start and the checkpoint: first the differences in the data, then those in the settings. `note`
    is a text for the user if the checkpoint does not record its data, and empty otherwise."""

    trained_on: TrainedOn
    changed: tuple[str, ...] = ()
    note: str = ""


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that a checkpoint records, as a dict from `section.key` to the value as
    JSON. The dict has every key that must not change on resume and every key whose change is
    reported. Raise InputError if a file that the configuration names is missing."""
    recorded: dict[str, Any] = {}
    for name, section in Config.sections().items():
        table = getattr(config, name).model_dump(mode="json")
        for key, value in table.items():
            if section.on_resume(key) in RECORDED:
                recorded[f"{name}.{key}"] = value
    graph = file_sha256(config.data_parallel)
    # a hash of the file's content is recorded, because the file may be edited
    if graph is not None:
        recorded["data_parallel.topology sha256"] = graph[:12]
    return recorded


def judge(
    kind: Literal["resume", "initial"], before: Before, config: Config, now: TrainedOn
) -> Answer:
    """Return the data with which a run continues from the checkpoint `before`. If `kind` is
    "resume", the run resumes from the checkpoint. If `kind` is "initial", a new run begins with the
    checkpoint's weights.

    `config` is the configuration of this start, and `now` is the data of a new run with this
    configuration. Raise InputError if the run may not continue.
    """
    _require_same_tokenizer(before, now)
    if kind == "resume":
        begin = ", or another run.dir with checkpoint.initial to begin from its weights"
        _require_same_model(before, config, _keys_without(FREE_TO_CHANGE), begin)
        _require_same_settings(before, config)
    else:
        _require_same_model(before, config, HEADS)
    changed = tuple(_changed_settings(before, config))
    note = ""
    if before.trained_on is None:
        note = _unknown(before)
    if kind == "initial":
        of_model = tuple(text for text in changed if text.startswith("model."))
        return Answer(now, of_model, note)
    known = before.trained_on or _as_far_as_known(before, now)
    differences = list(_differences(known.last, now.last))
    if not differences:
        return Answer(known, changed, note)
    if config.data.change != FROM_HERE:
        raise InputError(
            f"{before.path}: {'; '.join(differences)}: samples would be skipped or seen twice; "
            f'legal: the previous settings, or data.change = "{FROM_HERE}"'
        )
    return Answer(changed_at(known, now, before.step), (*differences, *changed))


def judge_base(before: Before, config: Config, now: TrainedOn) -> None:
    """Raise InputError if adapters that are trained with `config` on the data `now` do not fit the
    base model `before`. The commands `generate`, `evaluate` and `adapter merge` read the section
    [model] of the base model, so adapters must be trained with the values of the base model."""
    _require_same_tokenizer(before, now)
    free = FREE_BENEATH if config.task.kind == "none" else FREE_BENEATH | NEW_HEAD
    stored = ModelConfig.model_validate(before.model).balance if before.model else ""
    if "bias" not in (stored, config.model.balance):
        # `balance` may differ: only the value "bias" changes the output of the model. All other
        # values only choose a loss for the routers, and frozen routers have no such loss.
        free = free | {"balance"}
    _require_same_model(before, config, _keys_without(free))


def _require_same_tokenizer(before: Before, now: TrainedOn) -> None:
    known = before.trained_on
    if known is not None and known.tokenizer_sha256 != now.tokenizer_sha256:
        raise InputError(
            f"checkpoint {before.path}: it was trained with tokenizer {known.tokenizer} (sha256 "
            f"{known.tokenizer_sha256[:12]}), {now.last.sources[0].path} was made with "
            f"{now.tokenizer} (sha256 {now.tokenizer_sha256[:12]}), so every token id would "
            "mean another text; legal: shards made with the previous tokenizer"
        )


def _keys_without(free: Set[str]) -> list[str]:
    """Return the keys of [model] that are not in `free`, in the order of the section."""
    return [key for key in ModelConfig.model_fields if key not in free]


def _require_same_model(
    before: Before, config: Config, keys: Iterable[str], otherwise: str = ""
) -> None:
    """Raise InputError if one of the `keys` of [model] differs between the checkpoint and `config`.
    Comparing the shapes of the tensors is not enough: with another number of heads or another
    activation, the model would silently compute another function, although the shapes may be the
    same. `otherwise` is advice that the error message gives, for example to begin a new run with
    the checkpoint's weights. The message does not give this advice for keys in HEADS, because a new
    run that begins with the weights needs the same values of these keys."""
    here = config.model.model_dump()
    # a change of another key also changes the default of a derived key, and the error must name the
    # key that the user has changed
    keys = sorted(keys, key=lambda key: key in DERIVED)
    # if an older checkpoint does not record a key, the key had its default value
    known = ModelConfig.model_validate(before.model).model_dump() if before.model else {}
    if config.model.positions != "rope":
        # without rotary positions these keys have no effect, and an older version accepted values
        # that are illegal now
        keys = [key for key in keys if key not in ROPE_SCALING]
    for key in keys:
        stored = known.get(key, here[key])
        if stored != here[key]:
            raise InputError(
                f"checkpoint {before.path}: it was trained with model.{key} = {stored}, this run "
                f"has {here[key]}; legal: the previous value{'' if key in HEADS else otherwise}"
            )


def _require_same_settings(before: Before, config: Config) -> None:
    """Compare the keys outside [model] that must not change on resume. Raise InputError if the
    value of one of these keys differs between the checkpoint and `config`. Keys that a checkpoint
    of an older version does not record are not compared."""
    now = settings(config)
    for name, section in Config.sections().items():
        for key in section.model_fields:
            full = f"{name}.{key}"
            bound = name != "model" and section.on_resume(key) is OnResume.BOUND
            if bound and full in before.settings and before.settings[full] != now[full]:
                raise InputError(
                    f"checkpoint {before.path}: it was trained with {full} = "
                    f"{before.settings[full]}, this run has {now[full]}; legal: the previous value"
                )


def _changed_settings(before: Before, config: Config) -> Iterator[str]:
    """Yield a text for each recorded setting that has changed. For a checkpoint of an older
    version, only settings of the section [model] are compared."""
    old = {f"model.{key}": value for key, value in before.model.items()} | dict(before.settings)
    never_measured = "layers" not in before.kernels
    if never_measured and old.get("run.compile") is False and config.run.compile == "auto":
        # False was the default in older versions. With "auto" the layers of a run that has measured
        # nothing stay uncompiled, so nothing changes.
        del old["run.compile"]
    for key, value in settings(config).items():
        if key == "model.vocab_size" and value == 0:
            # The value 0 means the size that the data needs. Do not compare this size here: if it
            # has changed, the shapes of the tensors have changed, too, and loading the checkpoint
            # raises an error.
            continue
        if key in old and old[key] != value:
            yield f"{key} {old[key]} -> {value}"


def _unknown(before: Before) -> str:
    return (
        f"the training data of {before.path} is not known: it is a converted model, or an older "
        "version of ptdmpi wrote it and did not record the data"
    )


def _as_far_as_known(before: Before, now: TrainedOn) -> TrainedOn:
    """Return `now` with the seed and the batch size of the checkpoint `before`, which was written
    by an older version of this program. A checkpoint of an older version records only these two
    properties of its data."""
    size = before.samples // before.step if before.step else now.last.global_size
    return replace(now, stretches=(replace(now.last, seed=before.seed, global_size=size),))


def _differences(old: Stretch, new: Stretch) -> Iterator[str]:
    """Yield a text for each difference between `old` and `new` that changes the order of
    samples."""
    if old.seed != new.seed:
        yield f"run.seed {old.seed} -> {new.seed}"
    if old.global_size != new.global_size:
        yield f"batch.global_size {old.global_size} -> {new.global_size}"
    if old.ranks != new.ranks:
        yield f"data.train {_dealt(old)} -> {_dealt(new)}"
    if _shares(old.sources) != _shares(new.sources):
        yield f"data.train {_mixture(old.sources)} -> {_mixture(new.sources)}"


def _dealt(stretch: Stretch) -> str:
    if stretch.ranks == 1:
        return "drawn from by all data ranks"
    return f'dealt to {stretch.ranks} data ranks (data.split = "by_rank")'


def _shares(sources: tuple[Source, ...]) -> list[tuple[str, Fraction]]:
    """Return, for each dataset, its hash and its normalized weight, which is its weight in the
    mixture divided by the sum of all weights."""
    total = sum(Fraction(source.weight) for source in sources)
    return [(source.sha256, Fraction(source.weight) / total) for source in sources]


def _mixture(sources: tuple[Source, ...]) -> str:
    parts = []
    for source in sources:
        weight = ""
        if len(sources) > 1:
            weight = f", weight {source.weight}"
        parts.append(f"{source.path} ({source.sha256[:8]}{weight})")
    return " + ".join(parts)
