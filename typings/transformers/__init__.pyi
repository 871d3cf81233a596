# transformers has 1,700 files. A type checker that follows one import of it reads most of them, for half a minute.
# One script takes one model from it, and no type of qjax depends on it.
from typing import Any

def __getattr__(name: str) -> Any: ...
