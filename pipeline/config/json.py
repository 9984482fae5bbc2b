"""What YAML and JSON files hold, as types: a value, and an object with keys."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
else:
    Json = Any  # OmegaConf, which reads the schema's annotations as the program runs, knows no recursive types

Object = dict[str, Json]
