"""Shared fixtures: everything runs on one CPU thread at tiny sizes, without a download."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
