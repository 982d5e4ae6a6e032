"""A serving command for `serve:`: makes Ollama answer for a trained model, and takes it down again.

In tribe.yaml, beside `backend: trl` or `backend: command`:

    serve:
      command: [python, examples/training/serve_ollama.py, up, "{merged}", "{name}"]
      undeploy: [python, examples/training/serve_ollama.py, down, "{model}"]

`{merged}` makes sparta-api merge the adapter into its base model first; Ollama imports such a directory of
safetensors. `{name}` is a new name for every model, so the old one goes on answering until the new one is there.
The last line printed is the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

OLLAMA = os.environ.get("OLLAMA_PROGRAM", "ollama").split()
HOST = os.environ.get("OLLAMA_HOST", "http://127.0.0.1:11434")


def up(merged: Path, name: str) -> None:
    """Imports the directory under that name."""
    modelfile = merged / "Modelfile"
    modelfile.write_text(f"FROM {merged}\n")
    subprocess.run([*OLLAMA, "create", name, "-f", str(modelfile)], stdout=sys.stderr, check=True)
    print(json.dumps({"base_url": f"{HOST}/v1", "model": name}))


def down(model: str) -> None:
    """Removes the model."""
    subprocess.run([*OLLAMA, "rm", model], stdout=sys.stderr, check=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["up", directory, name]:
            up(Path(directory), name)
        case ["down", model]:
            down(model)
        case _:
            sys.exit(__doc__)
