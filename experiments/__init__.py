"""Commands: `python -m experiments.<name>`. Hydra lives here and nowhere else."""

import os

# A CPU training step takes and returns some 150 MB of fresh memory; faulting it in by 4 KB pages costs a tenth of the step.
# Torch reads this at its first allocation and then asks the kernel for 2 MB pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
