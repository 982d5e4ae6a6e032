"""What every section of `tribe.yaml` is made of: the strict base class and the common value types."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Probability = Annotated[float, Field(ge=0, le=1, strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Gpus = list[Annotated[int, Field(ge=0, strict=True)]]
EnvName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _safe_name(name: str) -> str:
    if "${" in name:
        raise ValueError("a name holds no variables, it has to mean the same in every run")
    if any(unicodedata.category(c) == "Cc" for c in name):
        raise ValueError("a name has no control characters")
    if any(part.strip() in ("", ".", "..") for part in name.replace("\\", "/").split("/")):
        raise ValueError("a name has no empty, '.' or '..' component")
    return name


Name = Annotated[Text, AfterValidator(_safe_name)]
"""Of a tribe or a member: it tells them apart for ever and may become part of file names."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
