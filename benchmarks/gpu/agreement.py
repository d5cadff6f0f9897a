"""Part: ten steps of a small model on the GPU and on the CPU have the same losses."""

import functools
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.training import train

TOLERANCE = {"--bf16": 1e-2, "": 1e-4}
"""By precision: largest relative difference of a loss. Sums have another order on each device, and
ten updates carry the difference on."""


def run(record: Record, sizes: Sizes) -> None:
    """Train twice in bf16 and twice in fp32; weights and data are drawn on the host."""
    for precision, tolerance in TOLERANCE.items():
        flags = SMALL.format(layers=2).replace("--bf16", precision)
        flags += f" --seq-length {sizes.small_length} --lr 1e-3 --log-interval 10"
        with ThreadPoolExecutor() as threads:
            here, on_cpu = threads.map(functools.partial(train, flags, 10), (False, True))
        differences = [
            abs(a["lm_loss"] - b["lm_loss"]) / b["lm_loss"]
            for a, b in zip(here, on_cpu, strict=True)
        ]
        name = "bf16" if precision else "fp32"
        record.row("losses", precision=name, first=here[0]["lm_loss"], last=here[-1]["lm_loss"],
                   **{"last, CPU": on_cpu[-1]["lm_loss"]}, difference=max(differences))  # fmt: skip
        problem = f"{name}: losses differ by {max(differences):.1e}, tolerance {tolerance:.0e}"
        record.expect(max(differences) < tolerance, problem)
        record.expect(here[-1]["lm_loss"] < here[0]["lm_loss"], f"{name}: the loss does not fall")
