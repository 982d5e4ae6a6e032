"""One DPO training with TRL in a process of its own: `python -m sparta_api.trainers.trl_worker SPEC.JSON`.

The loss is DPO's (Rafailov et al. 2023, eq. 7): `-log sigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))` over the
summed log probabilities of the chosen and rejected answers. The reference is the model that the member has been:
the base model for a first training, else the adapter that is continued, kept as a frozen copy.

The process ends with its parent, writes its figures step by step, and writes its result file last.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from sparta_api.data.journal import disk_error
from sparta_api.errors import SpartaError, TrainingError
from sparta_api.trainers.adapters_check import WEIGHTS_FILE
from sparta_api.trainers.trl_job import Job, JobFiles, Result, digest
from sparta_api.trainers.trl_pairs import Selection, load_tokenizer, read_pairs, select

FAILED = 3
LOCK_WAIT_S = 30.0
PR_SET_PDEATHSIG = 1
GIB = 1 << 30
COLLAPSED_MARGIN = 5.0
"""A mean reward margin above it means a DPO loss below 0.007: there is nothing left to learn."""
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def main(spec: Path) -> int:
    """Trains what the job file says; returns 0, or 3 after an expected fault (told in the result file)."""
    job = Job.model_validate_json(spec.read_bytes())
    files = JobFiles(spec.parent)
    die_with(job.parent_pid)
    held = hold(files)
    try:
        train(job, files).write(files.result)
        shutil.rmtree(files.checkpoints, ignore_errors=True)
        return 0
    except Exception as error:
        sentence = explain(error)
        traceback.print_exc()
        if sentence is None:
            return 1
        Result(key=job.key, state="failed", error=sentence).write(files.result)
        return FAILED
    finally:
        held.close()


def die_with(parent: int) -> None:
    """Ends this process when its parent does, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(128 + signal.SIGTERM)

    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
    threading.Thread(target=watch, daemon=True).start()


def hold(files: JobFiles) -> IO[bytes]:
    """Locks the job's directory and leaves this process's id there; waits a while for a worker that is just dying."""
    lock = files.lock.open("ab")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(b"%d\n" % os.getpid())
            lock.flush()
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SystemExit(f"another worker trains in {files.directory}; stop it, then resume the run") from None
            time.sleep(0.1)


def explain(error: Exception) -> str | None:
    """The sentence for an expected fault, None for a bug."""
    text = str(error)
    if isinstance(error, SpartaError):
        return text
    if isinstance(error, MemoryError) or any(mark in text.lower() for mark in OUT_OF_MEMORY):
        return (
            "out of memory; lower the trainer's batch_size or max_length, use precision: bfloat16, or free the GPU "
            "of servers (during_training: stop)"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return str(disk_error(Path(str(error.filename or "?")), error))
    return None


def train(job: Job, files: JobFiles) -> Result:
    """Everything from the base model to the adapter on disk."""
    started = time.monotonic()
    tokenizer = load_tokenizer(job.base_model)
    selection = usable_pairs(job, tokenizer)
    from sparta_api.trainers import trl_model

    figures = trl_model.Figures(files, job.config.checkpoint_s)
    trainer = trl_model.make_trainer(job, files, tokenizer, selection.pairs, figures)
    trl_model.check_reference(trainer, job)
    before = trl_model.trainable_weights(trainer.model)
    trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)
    trl_model.check_changed(trainer.model, before, job)
    trl_model.save_adapter(trainer.model, files.adapter, job.served_base)
    return summary(job, files, selection, figures, time.monotonic() - started)


def usable_pairs(job: Job, tokenizer: Any) -> Selection:
    """The pairs that can be learned from. Raises TrainingError when none is left."""
    from jinja2 import TemplateError

    config = job.config
    pairs = read_pairs(job.preferences, job.system_prompt, job.fold_system)
    try:
        selection = select(pairs, tokenizer, config.max_length, {tokenizer.eos_token_id} - {None})
    except TemplateError as error:
        hint = "; set system_role: fold for this member" if job.system_prompt and not job.fold_system else ""
        raise TrainingError(f"the chat template of {job.base_model} refuses the conversation ({error}){hint}") from None
    if not selection.pairs:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(selection.dropped.items()))
        raise TrainingError(
            f"none of the {len(pairs)} pairs in {job.preferences} can be trained on with max_length "
            f"{config.max_length} ({counts or 'no pairs'}); raise {job.place}.max_length or use shorter instructions"
        )
    return selection


def summary(job: Job, files: JobFiles, selection: Selection, figures: Any, seconds: float) -> Result:
    """The result of a finished training; `loss`, `margin` and `accuracy` are means over the last ten steps."""
    import torch

    loss, margin, accuracy = (figures.mean(name) for name in ("loss", "rewards/margins", "rewards/accuracies"))
    warnings = list(selection.warnings)
    if margin is not None and margin > COLLAPSED_MARGIN:
        warnings.append(
            f"loss collapsed to {loss:.4f} (reward margin {margin:.1f}) with learning_rate "
            f"{job.config.learning_rate:g} on {len(selection.pairs)} pairs: the model may have overfitted; lower the "
            "learning rate or the epochs"
        )
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(
        key=job.key,
        state="succeeded",
        sha256=digest(files.adapter / WEIGHTS_FILE),
        pairs=len(selection.pairs),
        dropped=dict(selection.dropped),
        steps=figures.steps,
        seconds=round(seconds, 2),
        loss=loss,
        margin=margin,
        accuracy=accuracy,
        memory_gib=round(memory / GIB, 2),
        warnings=warnings,
        versions={name: version(name) for name in ("torch", "transformers", "peft", "trl")},
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
