"""The table of costs of quantized products, from machine code."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.kernels.triton.linear_costs import ISSUED, LAUNCH, MULTIPROCESSORS, Product

PRODUCT = Product("int4", "down", 1, moved=4000, per_code=2.0, programs=66, resident=4, issued=0.0, flops=0.0)


def test_the_slowest_of_memory_instructions_and_products_decides() -> None:
    assert PRODUCT.seconds(1000.0, 10.0) == pytest.approx(LAUNCH + 4.0)
    issuing = replace(PRODUCT, issued=5 * ISSUED * 66)
    assert issuing.seconds(1000.0, 10.0) == pytest.approx(LAUNCH + 5.0), "half of the multiprocessors issue nothing"
    crowded = replace(issuing, programs=9 * MULTIPROCESSORS)
    assert crowded.seconds(1e9, 10.0) == pytest.approx(LAUNCH + 2.5)
    assert replace(PRODUCT, flops=60.0).seconds(1000.0, 10.0) == pytest.approx(LAUNCH + 6.0)


@pytest.mark.full
def test_int4_codes_are_widened_in_few_instructions_and_fill_the_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.linear_costs", "--formats", "int4, groups of 128"]
    done = subprocess.run([*command, "--rows", "1"], env=environment, capture_output=True, text=True, check=True).stdout
    rows = [line.strip("| ").split(" | ") for line in done.splitlines()[2:]]
    assert [row[1] for row in rows] == ["gate and up", "down"]
    for row in rows:
        assert float(row[4]) < 3.5, "instructions per code"
        assert float(row[5].split()[0]) > 3, "programs per multiprocessor"
