"""How a run is counted: what its next steps are trained on, and what is written of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ptdmpi.config import Config, InputError
from ptdmpi.data.order import SampleOrder
from ptdmpi.lineage.adapted import Adapted, Base, judge_adapted, require_kind
from ptdmpi.lineage.judge import Answer, Before, judge, judge_base, settings
from ptdmpi.lineage.trained_on import TrainedOn


class Course:
    """One run from where it stands. `now`: what a run of this configuration is trained on if it
    begins; until `judge` says otherwise, this one does."""

    def __init__(self, config: Config, now: TrainedOn) -> None:
        self.config, self.now = config, now
        self.settings = settings(config)  # as they are at the start: files may be edited meanwhile
        self.answer = Answer(now)
        self.base: Base | None = None  # beneath adapters
        # by which kernels each kind of product is computed, once that is settled
        self.kernels: Mapping[str, Sequence[str]] = {}
        self._order: SampleOrder | None = None

    def judge(
        self, kind: Literal["resume", "initial"], path: Path, manifest: Mapping[str, Any]
    ) -> None:
        """Take up what the checkpoint at `path` was trained on. Raises InputError if this run may
        not go on from it; the same on every rank."""
        if self.base is not None:
            judge_adapted(path, manifest, self.config.adapt, self.base)
        if kind == "resume":
            kept = manifest.get("kernels", {})
            # a checkpoint of before linears were chosen has a list: the ways of attention
            self.kernels = kept if isinstance(kept, Mapping) else {"attention": kept}
        self.go_on(judge(kind, Before.of(path, manifest), self.config, self.now))

    def go_on(self, answer: Answer) -> None:
        """Take up an answer that was given before."""
        self.answer, self._order = answer, None

    def stand_on(
        self, base: Base, path: Path, manifest: Mapping[str, Any], tokenizer_sha256: str | None
    ) -> None:
        """Take the model at `path` as what is frozen beneath the adapters. Raises InputError if it
        is none, or knows other tokens than the data."""
        require_kind(path, manifest)
        before = Before.of(path, manifest)
        judge_base(before, self.config, self.now)
        if before.trained_on is None:
            self.require_tokenizer(path, tokenizer_sha256)
        self.base = base

    def require_tokenizer(self, path: Path, sha256: str | None) -> None:
        """Raises InputError if the weights at `path` know another tokenizer than the data has;
        None: that is not known."""
        if sha256 not in (None, self.now.tokenizer_sha256):
            raise InputError(
                f"{path} has a tokenizer of sha256 {sha256[:12]}, the shards were made with "
                f"{self.now.tokenizer} (sha256 {self.now.tokenizer_sha256[:12]}): every id would "
                "mean another text; legal: shards made with its tokenizer"
            )

    @property
    def trained_on(self) -> TrainedOn:
        return self.answer.trained_on

    @property
    def order(self) -> SampleOrder:
        """The order of the samples from the next step on."""
        if self._order is None:
            last = self.trained_on.last
            self._order = last.order([part.epochs for part in self.config.data.train])
        return self._order

    def check(self) -> None:
        """Raises InputError if the run would exceed an `epochs`."""
        self.order.check(self.samples(self.config.run.steps))

    def samples(self, step: int) -> int:
        """Samples consumed when `step` steps are done."""
        return self.trained_on.last.samples_after(step)

    def tokens(self, step: int) -> int:
        """Tokens trained on when `step` steps are done."""
        return self.trained_on.last.tokens_after(step)

    def drawn(self, step: int) -> dict[str, list[float]]:
        """What `step` steps took of each training dataset that the run has seen."""
        sources = self.trained_on.last.drawn(self.order, step)
        return {
            "samples_drawn": [one.drawn for one in sources],
            "epochs": [one.drawn / one.samples for one in sources],
        }

    def in_manifest(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        method = self.config.data_parallel.method
        told = (self.config.adapt, self.base, self.config.task) if self.base else None
        return {
            **(Adapted(*told).in_manifest() if told else {}),
            "trained_on": self.trained_on.as_json(),
            "settings": self.settings,
            "kernels": {kind: list(ways) for kind, ways in self.kernels.items()},
            "data_parallel": {"method": method, "replicas": self.config.data_size},
        }
