"""The benchmark on a GPU. A file of its own: a GPU machine may lack what the command line needs."""

from pathlib import Path

import pytest

from shortlist.program.bench import running
from shortlist.program.bench.measurements import NOT_CAPTURED


@pytest.mark.gpu
def test_all_of_ours_runs_as_a_cuda_graph(tmp_path: Path) -> None:
    rows = running.run(["loss", "head", "hinge", "metrics"], quick=True, out=tmp_path / "gpu.csv", device="cuda")
    ours = [row for row in rows if row.entry.startswith("shortlist") and "sparse" not in row.entry]
    assert ours
    assert [row for row in ours if row.gpu_ms is None or NOT_CAPTURED in row.note] == []
