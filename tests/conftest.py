"""Shared fixtures: everything runs on one CPU thread at tiny sizes, without a download."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch may do

import contextlib
import inspect

import pytest
import torch

from tests.trained import Trained, trained_pair


def _prepare_interpreter() -> None:
    """Two things that Triton's interpreter does not do by itself.

    It holds numbers as arrays of one element, which numpy no longer turns into loop bounds. And a kernel finds the functions it
    calls by its globals, which are not a wrapper's: runtime type checks wrap every function of the package.
    """
    from triton.runtime import interpreter

    patch, create = interpreter._patch_lang_tensor, interpreter.InterpretedFunction.__init__

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_from_function(self, fn, **kwargs) -> None:
        create(self, inspect.unwrap(fn), **kwargs)

    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpretedFunction.__init__ = create_from_function


if "TRITON_INTERPRET" in os.environ:
    with contextlib.suppress(ImportError):
        _prepare_interpreter()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A verifier trained for seconds, its greedy and sampled caches, and a draft trained on them."""
    return trained_pair(tmp_path_factory.mktemp("tiny"))
