"""A training command for `backend: command`: one DPO job with LLaMA-Factory, one LoRA adapter out.

In tribe.yaml:

    trainers:
      factory:
        backend: command
        command: [python, examples/training/llamafactory_job.py, --pairs, "{preferences}", --base, "{base_model}",
                  --parent, "{parent}", --output, "{output}", --seed, "{seed}", --template, qwen]
    training: {trainer: factory}

`--parent` is empty in the first iteration. Later it is the previous adapter: LLaMA-Factory then continues it
(adapter_name_or_path), and the same adapter is named as the reference (ref_model, ref_model_adapters), because
LLaMA-Factory's own default would be the bare base model. The last line printed is the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DATASET = "tribe_pairs"


def main() -> int:
    """Writes data and settings next to the output, runs LLaMA-Factory, prints the result."""
    options = parse()
    work = options.output.parent / "llamafactory"
    work.mkdir(parents=True, exist_ok=True)
    write_dataset(options.pairs, work)
    settings = work / "job.json"
    settings.write_text(json.dumps(job(options, work), indent=1))
    code = subprocess.run([*options.program, "train", str(settings)], stdout=sys.stderr, check=False).returncode
    if code:
        print(f"LLaMA-Factory ended with code {code}", file=sys.stderr)
        return code
    print(json.dumps({"kind": "adapter", "train": str(options.output), "serve": str(options.output)}))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="preference file, format trl")
    parser.add_argument("--base", required=True, help="directory or hub id of the base model")
    parser.add_argument("--parent", default="", help="adapter to continue; empty for a fresh one")
    parser.add_argument("--output", type=Path, required=True, help="where the adapter goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--template", default="default", help="LLaMA-Factory's name of the chat template")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--program", nargs="+", default=["llamafactory-cli"], help="the program to run")
    return parser.parse_args()


def write_dataset(pairs: Path, work: Path) -> None:
    """The pairs in LLaMA-Factory's ranking format with OpenAI's tags, and the description that it looks up."""
    rows = []
    for line in pairs.read_text("utf-8").splitlines():
        row = json.loads(line)
        rows.append({"messages": row["prompt"], "chosen": row["chosen"][0], "rejected": row["rejected"][0]})
    (work / "pairs.json").write_text(json.dumps(rows, ensure_ascii=False), "utf-8")
    description = {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
    (work / "dataset_info.json").write_text(json.dumps({DATASET: description}, indent=1))


def job(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """LLaMA-Factory's settings of the job."""
    settings: dict[str, Any] = {
        "model_name_or_path": options.base,
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": options.rank,
        "lora_target": "all",
        "pref_loss": "sigmoid",
        "pref_beta": options.beta,
        "dataset": DATASET,
        "dataset_dir": str(work),
        "template": options.template,
        "cutoff_len": 2048,
        "output_dir": str(options.output),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": options.learning_rate,
        "num_train_epochs": options.epochs,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "logging_steps": 1,
        "report_to": "none",
        "seed": options.seed,
    }
    if options.parent:
        settings |= {
            "adapter_name_or_path": options.parent,
            "create_new_adapter": False,
            "ref_model": options.base,
            "ref_model_adapters": options.parent,
        }
    return settings


if __name__ == "__main__":
    sys.exit(main())
