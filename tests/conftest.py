"""Shared fixtures: everything runs on one CPU thread at tiny sizes, without a download."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch may do

import pytest
import torch

from tests.trained import Trained, trained_pair


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A verifier trained for seconds, its greedy and sampled caches, and a draft trained on them."""
    return trained_pair(tmp_path_factory.mktemp("tiny"))
