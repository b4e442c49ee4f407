"""The curve compared with transformers' in its quick form: both start the same, and stay together."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
def test_the_quick_form(tmp_path):
    subprocess.run([sys.executable, "-m", "benchmarks.meshes.transformers_curve", "--quick", "--output",
                    str(tmp_path / "x.json")], check=True, timeout=280)
    found = json.loads((tmp_path / "x.json").read_text())
    fp32, autocast, ours = found["curves"].values()
    assert len(fp32) == len(autocast) == len(ours) == 6 and (tmp_path / "x.png").is_file()
    assert ours == pytest.approx(fp32, rel=1e-3) and ours != fp32
