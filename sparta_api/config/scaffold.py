"""`init`: a commented `tribe.yaml` and small data files to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from sparta_api.config.keys import nearest
from sparta_api.errors import ConfigError

TEMPLATES: dict[str, dict[str, str]] = {
    "quickstart": {
        "tribe.yaml": "quickstart.yaml",
        "instructions.jsonl": "instructions.jsonl",
        "heldout.jsonl": "heldout.jsonl",
    },
    "vllm": {"tribe.yaml": "vllm.yaml", "instructions.jsonl": "instructions.jsonl"},
    "hosted": {"tribe.yaml": "hosted.yaml", "instructions.jsonl": "instructions.jsonl"},
}
"""By template: the files that `init` writes, and the shipped file that each is a copy of."""


def init(directory: Path, template: str = "quickstart") -> list[Path]:
    """Writes the template's files into the directory, which is made where it does not exist; returns their paths.

    Raises ConfigError for an unknown template, for a file that exists already (nothing is written then), and where
    the directory cannot be written.
    """
    if template not in TEMPLATES:
        raise ConfigError(f"there is no template '{template}'{nearest(template, list(TEMPLATES))}")
    targets = {directory / name: source for name, source in TEMPLATES[template].items()}
    for path in targets:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: the file exists already and is not overwritten; choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, source in targets.items():
            with path.open("xb") as file:
                file.write((files("sparta_api") / "templates" / source).read_bytes())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{error.filename or directory}: {reason}; choose another directory") from error
    return list(targets)
