"""The heavy half of the worker: model, adapter, reference, trainer. Imports torch, transformers, peft and trl."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from datasets import Dataset
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from trl.trainer import utils as trl_utils
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from sparta_api.data.journal import Journal, write_atomic
from sparta_api.errors import TrainingError
from sparta_api.trainers.adapters_check import CONFIG_FILE, read_adapter, refuse_other_shape, refuse_saved_modules
from sparta_api.trainers.trl_job import COMPLETE, Job, JobFiles
from sparta_api.trainers.trl_pairs import Pair, first_line

LN2 = math.log(2)
TOLERANCE = 0.01
SHOWN = ("loss", "grad_norm", "learning_rate", "epoch", "rewards/chosen", "rewards/rejected", "rewards/margins",
         "rewards/accuracies", "logps/chosen", "logps/rejected", "entropy", "num_tokens")  # fmt: skip


class Figures(TrainerCallback):
    """Writes one line of figures a step, and asks for a checkpoint now and then.

    Raises TrainingError at a loss that is not a number.
    """

    WINDOW = 10

    def __init__(self, files: JobFiles, checkpoint_s: float) -> None:
        self.journal = Journal(files.metrics)
        self.checkpoint_s = checkpoint_s
        self.saved = time.monotonic()
        self.steps = 0
        self.last: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Records one step's figures; they are of the model before that step's update."""
        logs: dict[str, float] = given["logs"]
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise TrainingError(f"the loss became {logs['loss']} at step {state.global_step}; lower the learning rate")
        row = {name: float(logs[name]) for name in SHOWN if name in logs}
        self.journal.append({"step": state.global_step, "total": state.max_steps, **row})
        self.steps = state.global_step
        self.last = [*self.last[1 - self.WINDOW :], row]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for a checkpoint when the last one is old enough."""
        if time.monotonic() - self.saved >= self.checkpoint_s and state.global_step < state.max_steps:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the checkpoint as whole, after all its files."""
        self.journal.sync()
        write_atomic(Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE, b"")
        self.saved = time.monotonic()

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the last steps."""
        values = [row[name] for row in self.last if name in row]
        return sum(values) / len(values) if values else None


def load_model(job: Job) -> tuple[Any, LoraConfig | None]:
    """The model that TRL is given: the base and the shape of a fresh adapter, or the base under the parent adapter.

    In the first case TRL's reference is the base, in the second a frozen copy of the parent.
    """
    parent = parent_directory(job)
    set_seed(job.seed)
    dtype = torch.bfloat16 if uses_bfloat16(job) else torch.float32
    try:
        base = AutoModelForCausalLM.from_pretrained(job.base_model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise TrainingError(f"the model {job.base_model} cannot be loaded: {first_line(error)}") from error
    lora = job.config.lora
    if parent is None:
        alpha: Any = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
        return base, LoraConfig(
            r=lora.r,
            lora_alpha=alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        )
    try:
        shape = PeftConfig.from_pretrained(parent)
        shape.lora_dropout = lora.dropout
        return PeftModel.from_pretrained(base, parent, is_trainable=True, config=shape), None
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"the adapter {parent} cannot be put on {job.base_model}: {first_line(error)}") from error


def parent_directory(job: Job) -> str | None:
    """Where the adapter to continue lies, fetched from the hub if need be. Raises TrainingError if it cannot go on."""
    if job.parent is None:
        return None
    directory = Path(job.parent)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(job.parent, allow_patterns=["adapter_*"]))
        except (OSError, ValueError) as error:
            raise TrainingError(f"the adapter {job.parent} cannot be fetched: {first_line(error)}") from error
    shape = read_adapter(directory)
    refuse_saved_modules(shape)
    refuse_other_shape(shape, job.config.lora, f"{job.place}.lora")
    return str(directory)


def uses_bfloat16(job: Job) -> bool:
    """Whether weights and activations are bfloat16; the adapter itself is float32 either way."""
    if job.config.precision == "auto":
        return bool(torch.cuda.is_available() and torch.cuda.is_bf16_supported())
    return job.config.precision == "bfloat16"


def make_trainer(job: Job, files: JobFiles, tokenizer: Any, pairs: list[Pair], figures: Figures) -> Any:
    """TRL's trainer around the loaded model, ready to start. Raises TrainingError when nothing is trainable."""
    model, fresh = load_model(job)
    score_answers_only()
    trainer: Any = DPOTrainer(
        model=model,
        args=arguments(job, files, len(pairs)),
        train_dataset=Dataset.from_list([pair.row() for pair in pairs]),
        processing_class=tokenizer,
        peft_config=fresh,
        callbacks=[figures],
    )
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise TrainingError(f"the adapter {job.parent or 'made for ' + job.base_model} has no trainable parameters")
    return trainer


def score_answers_only() -> None:
    """Lets TRL's fused output layer skip the prompt's tokens on a CPU too, where it computes and discards them.

    The same values at a tenth less time; a TRL that decides this elsewhere is left as it is.
    """
    if hasattr(trl_utils, "_use_triton"):
        trl_utils._use_triton = lambda device: True


def arguments(job: Job, files: JobFiles, pairs: int) -> DPOConfig:
    """TRL's settings for a job of so many pairs. A warm-up of less than one step is none."""
    config, on_gpu = job.config, torch.cuda.is_available()
    steps = math.ceil(math.ceil(pairs / config.batch_size) / config.gradient_accumulation) * config.epochs
    return DPOConfig(
        output_dir=str(files.checkpoints),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        num_train_epochs=config.epochs,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        beta=config.beta,
        max_length=config.max_length,
        loss_type=["sigmoid", "sft"] if config.sft_weight else ["sigmoid"],
        loss_weights=[1.0, config.sft_weight] if config.sft_weight else [1.0],
        precompute_ref_log_probs=config.epochs > 1,
        disable_dropout=config.lora.dropout == 0,
        bf16=uses_bfloat16(job),
        gradient_checkpointing=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
        data_seed=job.seed,
    )


def check_reference(trainer: Any, job: Job) -> None:
    """Raises TrainingError unless the DPO reference is the model that is about to be trained.

    A continued adapter must have a frozen copy that equals it bit by bit, and on the shortest pair the DPO loss
    must be ln 2 with reward margin 0 (both models are the same one).
    """
    wrong = "the DPO reference is not the member's previous model"
    loss, margin = first_loss(trainer)
    if not (abs(loss - LN2) <= TOLERANCE and abs(margin) <= 2 * TOLERANCE):
        raise TrainingError(
            f"{wrong}: before any update the DPO loss is {loss:.4f} instead of {LN2:.4f} (reward margin {margin:.4f})"
        )
    if job.parent is None:
        return
    weights = dict(trainer.model.named_parameters())
    for name, own in weights.items():
        copy = weights.get(name.replace(".default.", ".ref."))
        if ".default." in name and (copy is None or copy.requires_grad or not torch.equal(copy, own)):
            raise TrainingError(f"{wrong}: it is no frozen copy of the adapter {job.parent} ({name})")


def first_loss(trainer: Any) -> tuple[float, float]:
    """DPO loss and reward margin on the shortest pair, without an update."""
    rows = trainer.train_dataset
    lengths = [len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows]
    batch = trainer.data_collator([rows[lengths.index(min(lengths))]])
    batch = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad(), trainer.accelerator.autocast():
        outputs = trainer.model(**inputs, labels=labels, use_cache=False, fused_lm_head=True)
        chosen, rejected = outputs.log_probs.sum(dim=1).float().tolist()
        references = [float(value) for value in trainer.compute_ref_log_probs(trainer.model, batch)]
    trainer.model.train(training)
    margin = trainer.beta * ((chosen - references[0]) - (rejected - references[1]))
    return math.log1p(math.exp(-margin)), margin


def trainable_weights(model: Any) -> str:
    """A digest of everything that training may change."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sha.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return sha.hexdigest()


def check_changed(model: Any, before: str, job: Job) -> None:
    """Raises TrainingError when training left the adapter as it was, or filled it with numbers that are none."""
    if trainable_weights(model) == before:
        raise TrainingError(f"training changed nothing; raise {job.place}.learning_rate or lower its warmup_ratio")
    if not all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad):
        raise TrainingError(f"training left weights that are not finite; lower {job.place}.learning_rate")


def save_adapter(model: Any, target: Path, base: str) -> None:
    """Writes the adapter (and not its reference) beside its place, syncs it and renames it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(temporary, selected_adapters=["default"])
    (temporary / "README.md").unlink(missing_ok=True)
    config = orjson.loads((temporary / CONFIG_FILE).read_bytes())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    write_atomic(temporary / CONFIG_FILE, orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    for file in temporary.iterdir():
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
