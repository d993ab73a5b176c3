"""Triton kernels of the CUDA path: optional, and each with its plain form elsewhere, which the tests compare it with."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def triton_is_installed() -> bool:
    return find_spec("triton") is not None
