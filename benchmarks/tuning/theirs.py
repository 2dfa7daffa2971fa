"""The same adapters by `peft` and `transformers`: where they begin, and how they train.

    python -m benchmarks.tuning.theirs begin HF FOLDER RANK ALPHA
    python -m benchmarks.tuning.theirs train RUN HF BEGIN MERGED

`begin` writes fresh adapters beside all linears of the model directory HF into FOLDER. `train`
trains them, from BEGIN, on the data and at the rates of RUN, a finished training on one rank, and
prints as JSON: their losses, and how far logits are from each other: of RUN and MERGED by type, of
RUN in float32 and in float64, and of RUN and theirs.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptdmpi.comm import launch
from ptdmpi.model.batch import Batch

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_of(path: Path) -> Any:
    """The model at `path` in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )


def begin(path: Path, folder: Path, rank: int, alpha: float) -> None:
    """Adapters as `peft` begins with them: A random, B zero."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=LINEARS, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model_of(path), config).save_pretrained(folder)


def seen(batch: Batch) -> dict[str, Tensor]:
    """What their model takes of a microbatch: ids [b, s]; where its rows hold several documents,
    positions and a mask [b, 1, s, s] of the keys that each query sees."""
    ids = batch.inputs.t()
    if batch.documents is None:
        return {"input_ids": ids}
    numbers = batch.documents.numbers
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return {
        "input_ids": ids,
        "position_ids": batch.documents.positions.t(),
        "attention_mask": same & torch.ones(same.shape[-2:], dtype=torch.bool).tril(),
    }


def loss_of(model: Any, batch: Batch) -> Tensor:
    """The sum over a microbatch's tokens that count."""
    logits = model(**seen(batch)).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.t().flatten(), reduction="none"
    )
    weights = torch.ones_like(losses) if batch.weights is None else batch.weights.t().flatten()
    return (losses * weights).sum()


def stepped(model: Any, config: Any, batches: list[list[Batch]], rates: list[float]) -> list[float]:
    """The losses of AdamW's steps."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    own = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, betas=(own.beta1, own.beta2), eps=own.eps, weight_decay=own.weight_decay
    )
    losses = []
    for step, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        tokens = sum(batch.tokens for batch in step)
        total = 0.0
        for batch in step:
            loss = loss_of(model, batch) / tokens
            loss.backward()
            total += float(loss.detach())
        if own.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, own.clip_norm)
        optimizer.step()
        losses.append(total)
    return losses


def apart(one: Tensor, other: Tensor) -> float:
    """The greatest difference over the greatest magnitude."""
    return float((one - other).abs().max() / other.abs().max())


def train(run: Path, path: Path, begun: Path, merged: Path) -> dict[str, Any]:
    """What is printed; see above."""
    import peft

    from ptdmpi.comm.world import World
    from ptdmpi.config import load, resolve
    from ptdmpi.inference.model import open_inference
    from ptdmpi.plan.layout.grid import grid_of
    from ptdmpi.train.feed import Feed

    world = World()
    torch.set_num_threads(1)
    config = resolve(load(run / "config.toml"), 1)
    feed = Feed(config, world.split(grid_of(config)), torch.device("cpu"))
    with contextlib.closing(feed.steps(0)) as steps:
        batches = [feed.place(next(steps)) for _ in range(config.run.steps)]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [one["learning_rate"] for one in records if "loss" in one]

    def logits(precision: str, path: Path, adapter: Path | None) -> Tensor:
        """Those of the first row's tokens, [s, V]."""
        opened, _ = open_inference(path, world, None, precision, adapter=adapter)
        with torch.no_grad():
            (stage,) = opened.stages.values()
            return stage.heads(opened.hidden(ids))[0][:, 0, : feed.vocab_size].double()

    ids = batches[0][0].inputs[:, :1]
    base = Path(config.adapt.base)
    beside = {kind: logits(kind, base, run) for kind in ("fp32", "fp64")}
    whole = {kind: logits(kind, merged, None) for kind in beside}
    model = peft.PeftModel.from_pretrained(model_of(path), str(begun), is_trainable=True)
    model.eval()
    losses = stepped(model, config, batches, rates)
    with torch.no_grad():
        own = model(input_ids=ids.t()).logits[0]
    return {
        "losses": losses,
        "merged": {kind: apart(whole[kind], beside[kind]) for kind in beside},
        "rounding": apart(beside["fp32"], beside["fp64"]),
        "theirs": apart(beside["fp32"], own.double()),
    }


def main() -> None:
    doing, *words = sys.argv[1:]
    paths = [Path(word) for word in words[:4]]
    if doing == "begin":
        begin(paths[0], paths[1], int(words[2]), float(words[3]))
        return
    launch.prepare()
    print(json.dumps(train(*paths)))


if __name__ == "__main__":
    main()
