# SPDX-License-Identifier: Apache-2.0
"""`make env` where the package index serves a torch that cannot be imported, as most do outside: a CUDA build.

Two small local indexes stand for the package index and for PyTorch's index of CPU wheels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUDA_BUILD = "import libcudart"
BACKEND = """
import zipfile

FILES = {
    "METADATA": ["Metadata-Version: 2.1", "Name: dmi_connector", "Version: 1.0"],
    "WHEEL": ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any"],
    "RECORD": [],
}

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "dmi_connector-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("dmi_connector.py", "")
        for file, lines in FILES.items():
            wheel.writestr(f"dmi_connector-1.0.dist-info/{file}", "".join(line + chr(10) for line in lines))
    return name

build_wheel = build_editable
"""


def add_wheel(index: Path, name: str, version: str, code: str) -> None:
    """Put a package of one module into a local index."""
    folder, info = index / name, f"{name}-{version.replace('+', '_')}.dist-info"
    folder.mkdir(parents=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with our Makefile, two packages in its lock file, and a backend of its own."""
    folder = tmp_path / "project"
    (folder / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND)
    pins_of = {"cpu": "torch==2.0\nvllm==1.0\n", "test": "", "docs": "", "cuda": "libcudart==1.0\n"}
    for lock, pins in pins_of.items():
        (folder / f"requirements/{lock}.txt").write_text(pins)
    add_wheel(tmp_path / "index", "torch", "2.0", CUDA_BUILD)
    add_wheel(tmp_path / "index", "vllm", "1.0", "import torch")
    return folder


def make_env(project: Path, cpu_index: Path) -> subprocess.CompletedProcess[str]:
    """Run `make env` as a user whose only setting is the package index."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "PYTHON"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": (project.parent / "index").as_uri()}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    command = ["make", "env", f"TORCH_INDEX={cpu_index.as_uri()}"]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)


def imported(project: Path) -> str:
    """The version of torch with which the packages of the environment are imported."""
    show = "from importlib.metadata import version; import vllm, dmi_connector; print(version('torch'))"
    return subprocess.check_output([project / ".venv/bin/python", "-c", show], text=True).strip()


@pytest.mark.soak
def test_a_torch_that_cannot_be_imported_is_replaced(project: Path, tmp_path: Path) -> None:
    """`make env` installs the CPU wheel of torch. If there is none, it installs the libraries of the CUDA build.

    One line says so, and no setting is needed. Without wheel and libraries, the error names the setting, and the next
    run starts again.

    The cases run in one project, one after the other, because each environment takes seconds to build.
    """
    index, cpu = tmp_path / "index", tmp_path / "cpu"
    cpu.mkdir()
    done = make_env(project, cpu)
    assert done.returncode != 0
    assert "Name an index that has it: make env TORCH_INDEX=URL" in done.stderr
    assert not list((project / ".venv").glob(".stamp-*"))

    add_wheel(cpu, "torch", "2.0+cpu", "")
    done = make_env(project, cpu)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "cannot be imported" in line]
    where = cpu.as_uri()
    assert said == [f"env 2/3: torch==2.0 of the package index cannot be imported: taking its CPU wheel from {where}"]
    assert imported(project) == "2.0+cpu"
    assert make_env(project, cpu).stdout == "", "a second run does nothing"

    shutil.rmtree(cpu / "torch")
    add_wheel(index, "libcudart", "1.0", "")
    (packages,) = (project / ".venv/lib").glob("python*/site-packages")
    for path in (*(project / ".venv").glob(".stamp-*"), packages / "torch.py"):
        path.unlink()
    (installed,) = packages.glob("torch-*.dist-info")
    shutil.rmtree(installed)
    done = make_env(project, cpu)
    assert done.returncode == 0, done.stderr
    assert "env 2/3: no CPU wheel there: taking the libraries of the CUDA build" in done.stdout
    assert imported(project) == "2.0"
