"""Functions over arrays, compiled to machine code when their module is imported (ADR 39)."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile a function for arguments of these types and no others, so that no decision ever waits for a compiler.

    What was compiled is kept beside the module, or in the user's cache; where neither can be written, each process
    compiles anew, in a second. A function compiled here must not call one of another module: numba would not see that
    one change.
    """

    def decorate(function: Function) -> Function:
        def compile_it(cache: bool) -> Function:
            decorator: Any = numba.njit(signature, cache=cache, error_model="numpy")
            return cast(Function, decorator(function))

        try:
            return compile_it(cache=True)
        except (RuntimeError, OSError):  # numba finds no folder that it may write to
            return compile_it(cache=False)

    return decorate
