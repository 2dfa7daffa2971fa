"""The loss of pairs of answers, and its gradient, next to TRL's own trainer."""

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.model.output.losses import MARGIN
from tests._engines import VOCAB_SIZE, build, load, whole_gradients
from tests._layers import difference
from tests.engine.test_engine_hugging_face import COMMON, SHAPES, L, llama_names
from tests.parallel import parallel
from tests.preference.test_loss import BETA, CHANGES, LENGTH, batches, row

PAIRS = COMMON | SHAPES["llama"] | CHANGES
PAIRS |= {"preference.label_smoothing": 0.0, "precision.compute": "fp32"}


def their_model(seed):
    """Return a random model of transformers, with weights large enough that each matters."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        num_hidden_layers=L,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def their_trainer(trl, folder, model):
    """Return TRL's trainer. Its data set is not used; the log-probabilities of the reference come
    with the pairs."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<pad>", unk_token="<pad>"
    )
    options = {"beta": BETA, "loss_type": "sigmoid", "report_to": [], "use_cpu": True}
    options |= {"bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    return trl.DPOTrainer(
        model,
        ref_model=their_model(1),
        args=trl.DPOConfig(str(folder), **options),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}]),
        processing_class=tokenizer,
    )


def their_batch(count):
    """Return the pairs of `count` rows as TRL's collator makes them: the chosen answers first."""
    answers = []
    for number in range(count):
        pairs = row(number)
        for first, end in pairs.answers:
            # `weights` and `references` are those of the next position
            weights = [0, *pairs.weights[first : end - 1]]
            logs = pairs.references[first : end - 1][pairs.weights[first : end - 1] > 0]
            answers.append((pairs.ids[first:end], weights, float(logs.sum())))
    answers = answers[::2] + answers[1::2]
    names = ("input_ids", "attention_mask", "completion_mask")
    made = {name: torch.zeros(len(answers), LENGTH, dtype=torch.long) for name in names}
    for place, (ids, weights, _) in enumerate(answers):
        made["input_ids"][place, : len(ids)] = torch.from_numpy(ids)
        made["attention_mask"][place, : len(ids)] = 1
        made["completion_mask"][place, : len(ids)] = torch.tensor(weights) > 0
    logs = torch.tensor([log for _, _, log in answers])
    made["ref_chosen_logps"], made["ref_rejected_logps"] = logs.chunk(2)
    return made


@pytest.mark.long
@parallel(ranks=[1], limit_s=300)
def test_equals_the_loss_of_trl(comm, tmp_path):
    trl = pytest.importorskip("trl", reason="the extra `trl` is missing")
    model = their_model(0)
    trainer = their_trainer(trl, tmp_path, model)
    trainer.precompute_ref_logps = True
    engine = build(World(comm), PAIRS)
    load(engine, llama_names(lambda name: model.get_parameter(name).detach().clone()))
    loss = trainer.compute_loss(model, their_batch(engine.config.batch.global_size))
    loss.backward()
    result = engine.step(0, batches(engine, 0))
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    (margin,) = trainer._metrics["train"]["rewards/margins"]
    assert result.losses[MARGIN].mean == pytest.approx(margin, rel=1e-4)
    gradients = llama_names(lambda name: model.get_parameter(name).grad)
    for name, ours in whole_gradients(engine).items():
        assert difference(ours, gradients[name]) < 1e-4, name
